"""Collectives inside a cluster: replica shards gathered in pieces, and agreements on the host."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dsx.engines import cluster_collectives
from dsx.engines import replicated as replicated
from dsx.engines.masters import Piece
from tests.distributed import run_distributed

SIZES = {"a": 7, "b": 1, "c": 20, "d": 3}
ASSIGNMENT = [["c", "a"], ["b"], ["d"]]
OFFSET = 2  # of a parameter in the tensor that holds it


def all_gather(chunk: int) -> tuple[dict[str, list[float]], list[int], int]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    replicated._CHUNK = chunk
    flat = {name: torch.full((numel + OFFSET,), -1.0) for name, numel in SIZES.items()}
    wholes = {n: Piece(flat[n], (numel,), offset=OFFSET) for n, numel in SIZES.items()}
    made = replicated.ReplicaShards(ASSIGNMENT, wholes, None, torch.device("cpu"))
    for piece in made.pieces.values():  # each rank writes its own, with its rank in it
        values = torch.arange(piece.start, piece.start + piece.numel, dtype=torch.float32)
        piece.view().copy_(values + 100 * rank)
    made.all_gather([0, 2])
    own = [sum(p.numel for n, p in made.pieces.items() if n in names) for names in ASSIGNMENT]
    return {name: tensor.tolist() for name, tensor in flat.items()}, own, made.buffer_bytes


@pytest.mark.parametrize("chunk", [1, 6, 13, 1 << 24])
def test_shares_are_brought_together_in_pieces_of_any_size(chunk: int) -> None:
    ranks = run_distributed(all_gather, 3, chunk)
    owned = [own for _, own, _ in ranks]
    assert [sum(own[f] for own in owned) for f in range(3)] == [27, 1, 3]
    assert owned == [[9, 1, 1], [9, 0, 1], [9, 0, 1]]
    expected: dict[str, list[float]] = {n: [-1.0] * (k + OFFSET) for n, k in SIZES.items()}
    for names, run in ((ASSIGNMENT[0], 9), (ASSIGNMENT[2], 1)):
        row = [(name, i) for name in names for i in range(SIZES[name])]
        for rank_info, (name, i) in enumerate(row):
            expected[name][OFFSET + i] = i + 100 * (rank_info // run)
    for flat, _, buffer_bytes in ranks:
        assert buffer_bytes == 4 * max(1, min(9, chunk // 3)) * (3 + 1)
        assert {n: v for n, v in flat.items() if n != "b"} == {
            n: v for n, v in expected.items() if n != "b"
        }
    assert [flat["b"][OFFSET:] for flat, _, _ in ranks] == [[0.0], [-1.0], [-1.0]]  # not asked for


def agree_beside(is_gloo: bool) -> tuple[bool, list[int], float]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    even, odd = dist.new_group([0, 2]), dist.new_group([3, 1])
    own = odd if rank % 2 else even
    if not is_gloo:
        dist.get_backend = lambda group=None: "nccl"  # as on accelerators
    made = cluster_collectives.beside(own)
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=made)
    return made is own, dist.get_process_group_ranks(made), value.item()


@pytest.mark.parametrize("is_gloo", [True, False])
def test_agreements_run_over_the_same_ranks_on_the_host(is_gloo: bool) -> None:
    for rank, (is_same, ranks, total) in enumerate(run_distributed(agree_beside, 4, is_gloo)):
        assert is_same == is_gloo
        assert sorted(ranks) == [rank % 2, rank % 2 + 2]
        assert total == 2 * (rank % 2) + 2
