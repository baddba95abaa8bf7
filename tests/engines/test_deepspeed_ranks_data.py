"""Which samples ranks of a sequence, or of a slice, read of `training_data`; and after a resume."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

import dsx
from tests.distributed import run_distributed
from tests.engines.deepspeed_ranks import (
    LENGTH,
    STREAMING,
    WIDTH,
    DealingMpu,
    Kind,
    arguments_of,
    own_part,
)
from tests.engines.engines import quiet
from tests.engines.test_deepspeed_data import read_in_this_process
from tests.installed import needs

pytestmark = needs("deepspeed")

NUM_SAMPLES, STOP, BATCHES = 24, 5, 14  # of a cluster's 12 samples a batch reads two
KINDS = [Kind("sequence", 1), Kind("tensor", 1)]


class Samples(Dataset[Any]):
    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(LENGTH, WIDTH, generator=generator), index


def build(kind: Kind) -> Any:
    given = arguments_of(kind, seed=0, **STREAMING)
    if kind.divides == "sequence":
        given["mpu"] = DealingMpu(given["mpu"])
    return dsx.initialize(training_data=Samples(), **given)


def batches(engine: Any, loader: Any, kind: Kind) -> Iterator[list[int]]:
    """Train without end, and yield the samples of each micro-batch."""
    while True:
        for x, index in loader:
            part = own_part(kind, x)
            engine.backward(engine(part, torch.tanh(part)))
            engine.step()
            yield index.tolist()


def read(base: str) -> list[dict[str, Any]]:
    quiet()
    read_in_this_process()
    found = []
    for kind in KINDS:
        engine, _, loader, _ = build(kind)
        taken = batches(engine, loader, kind)
        before = list(islice(taken, STOP - 1))
        engine.save_checkpoint(f"{base}/{kind.divides}", tag="at")
        whole = before + list(islice(taken, BATCHES))
        cluster, readers = engine.dsx.cluster_id, loader._num_replicas
        engine.dsx.close()
        engine.destroy()
        engine, _, loader, _ = build(kind)
        engine.load_checkpoint(f"{base}/{kind.divides}", tag="at")
        resumed = before + list(islice(batches(engine, loader, kind), BATCHES))
        engine.dsx.close()
        engine.destroy()
        one = {"whole": whole, "resumed": resumed, "cluster": cluster, "readers": readers}
        found.append({**one, "reader": dist.get_rank() // kind.size})
    return found


@pytest.mark.ci
@pytest.mark.parametrize("num_ranks", [4, pytest.param(8, marks=pytest.mark.slow)])
def test_ranks_of_one_sequence_read_the_same_and_clusters_apart(
    num_ranks: int, tmp_path: Any
) -> None:
    results = run_distributed(read, num_ranks, str(tmp_path), timeout_seconds=280)
    for number, _ in enumerate(KINDS):
        told = [rank[number] for rank in results]
        epoch = NUM_SAMPLES // 2 // (2 * told[0]["readers"])  # batches
        assert told[0]["readers"] == num_ranks // 4
        by_cluster: list[set[int]] = [set(), set()]
        for one in told:
            assert one["resumed"] == one["whole"]
            peers = [o for o in told if o["cluster"] == one["cluster"]]
            for other in peers:
                is_same = other["reader"] == one["reader"]
                assert (other["whole"] == one["whole"]) == is_same
            by_cluster[one["cluster"]] |= {i for batch in one["whole"][:epoch] for i in batch}
        assert by_cluster == [set(range(m, NUM_SAMPLES, 2)) for m in range(2)]
