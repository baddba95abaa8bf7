"""What each rank reads of the others' files where a run goes on with other ranks: its own share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tests.compress.test_over_gloo as codecs
from dsx.checkpoint.files import SavedRank, rank_file
from dsx.checkpoint.outer_state import load_state
from dsx.comm.in_process import InProcessHub
from dsx.comm.topology import RankInfo
from dsx.compress.error_feedback import Residual, read_part
from dsx.outer.loop import OuterLoop
from tests.checkpoint.saved import save_state
from tests.checkpoint.test_reshard import ShardAdapter, new_tiny, save_all
from tests.compress.test_over_gloo import loss, simulated
from tests.simulated import Simulated
from tests.tiny import mean_loss

TWO, THREE, FOUR = (0, 0.5, 1), (0, 0.4, 0.7, 1), (0, 0.25, 0.5, 0.75, 1)
MOST = 1.1  # times what a rank keeps itself


def shards(run: Simulated, cuts: Sequence[float]) -> list[OuterLoop]:
    """Return the loops of cluster 0's ranks, each with its part of every parameter."""
    whole = run.loops[0]
    seat = whole.transport.seat
    return [
        OuterLoop(
            run.method,
            ShardAdapter(whole.adapter, rank, cuts),
            InProcessHub(seat.membership).transports()[seat.position],
        )
        for rank in range(len(cuts) - 1)
    ]


def through(loops: Sequence[OuterLoop], source: Path, target: Path) -> None:
    for rank, loop in enumerate(loops):
        rank_info = RankInfo(0, loop.transport.seat.num_clusters, rank, len(loops))
        load_state(loop, source, rank_info, {})
        save_state(loop, target, rank_info, "run", {}, {})


def bytes_of(path: Path) -> int:
    saved = SavedRank(path)
    return sum(saved.read(name).nbytes for name in saved._names)


@pytest.mark.parametrize(
    ("method", "compression"),
    [
        ("streaming_diloco", None),
        ("diloco_delayed", {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}),
        ("diloco_delayed", {"type": "quantized", "wire": "int4", "error_feedback": "bf16"}),
        ("diloco_delayed", {"type": "quantized", "wire": "int4", "error_feedback": "int8"}),
        ("diloco_delayed", {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"}),
        ("dilocox", {"type": "low_rank"}),
    ],
)
def test_no_rank_reads_more_than_its_share(
    method: str, compression: dict[str, Any] | None, tmp_path: Path, monkeypatch: Any
) -> None:
    if compression is None:
        run = new_tiny(method)
    else:
        monkeypatch.setitem(codecs.CODECS_OF_ALL, "own", compression)
        run = simulated(method, "own", 2)
    for _ in range(7):
        run.train_step(mean_loss if compression is None else loss)
    save_all(run, tmp_path)
    through(shards(run, FOUR), tmp_path / "0", tmp_path / "four")
    _require_own_share(shards(run, THREE), tmp_path / "four", tmp_path / "three", monkeypatch)


def _require_own_share(
    loops: Sequence[OuterLoop], source: Path, target: Path, monkeypatch: Any
) -> None:
    """Load and save on each rank; what it reads is at most MOST times what it then keeps."""
    read = [0]
    plain = SavedRank.read

    def counted(self: SavedRank, name: str, *part: int) -> Tensor:
        found = plain(self, name, *part)
        read[0] += found.nbytes
        return found

    monkeypatch.setattr(SavedRank, "read", counted)
    reads: list[int] = []
    for rank, loop in enumerate(loops):
        rank_info = RankInfo(0, 2, rank, len(loops))
        read[0] = 0
        load_state(loop, source, rank_info, {})
        reads.append(read[0])
        save_state(loop, target, rank_info, "run", {}, {})
    own = [bytes_of(rank_file(target, rank)) for rank in range(len(loops))]
    assert all(0 < r <= MOST * kept for r, kept in zip(reads, own, strict=True)), (reads, own)


@pytest.mark.parametrize("cuts", [(TWO, FOUR), (FOUR, TWO), (THREE, TWO), (FOUR, FOUR)])
@pytest.mark.parametrize("method", ["streaming_diloco", "dilocox"])
def test_so_it_is_for_any_two_numbers_of_ranks(
    method: str, cuts: tuple[Sequence[float], Sequence[float]], tmp_path: Path, monkeypatch: Any
) -> None:
    before, after = cuts
    is_wide = method == "dilocox"
    run = simulated(method, "low_rank", 2) if is_wide else new_tiny(method)
    for _ in range(7):
        run.train_step(loss if is_wide else mean_loss)
    save_all(run, tmp_path)
    through(shards(run, before), tmp_path / "0", tmp_path / "before")
    _require_own_share(shards(run, after), tmp_path / "before", tmp_path / "after", monkeypatch)


@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("numel", [1, 256, 1000])
def test_a_part_of_a_residual_is_that_of_the_whole(storage: Any, numel: int) -> None:
    residual = Residual(numel, storage, 1.0)
    residual.write(torch.randn(numel, generator=torch.Generator().manual_seed(0)))
    whole = residual.read()
    for start, stop in ((0, numel), (numel // 3, numel // 2 + 1), (numel - 1, numel)):
        part = read_part(lambda a, b: residual.stored[a:b], numel, storage, start, stop)
        assert torch.equal(part, whole[start:stop])
