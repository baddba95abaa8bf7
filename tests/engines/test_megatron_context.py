"""Ranks of one context-parallel group are one to the data: they read the same samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import dsx
from megatron_patches import joining
from tests.distributed import run_distributed
from tests.engines.megatrons import dsx_config, needs_megatron
from tests.engines.test_megatron_patches import CLUSTERS, MICRO_BATCH, RANKS, TOTAL, patched

pytestmark = needs_megatron

CONTEXT, MICRO_BATCHES = 2, 3


def read_everything() -> dict[str, Any]:
    """Return what this rank of each cluster reads, as Megatron's loaders ask the samplers."""
    from dsx.bench.megatron_on_cpu import install

    install()
    dsx.init_distributed(dsx_config(clusters={"num_clusters": 1}))
    from megatron.core import num_microbatches_calculator, parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=CONTEXT)
    samples: list[list[int]] = []
    state: Any = parallel_state
    place = state.get_data_parallel_rank(), state.get_data_parallel_world_size()
    with pytest.MonkeyPatch.context() as monkeypatch:
        for cluster in range(CLUSTERS):
            kind, _ = patched(monkeypatch, cluster)
            samples.append([s for batch in kind(TOTAL, 0, MICRO_BATCH, *place) for s in batch])
    whole = MICRO_BATCHES * MICRO_BATCH * RANKS
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, whole, MICRO_BATCH, RANKS)
    counters = joining.Counters(SimpleNamespace(), None)  # type: ignore[arg-type]
    counted = counters._batch(SimpleNamespace(micro_batch_size=MICRO_BATCH))
    return {"samples": samples, "counted": counted, "context": state.get_context_parallel_rank()}


@pytest.mark.ci
def test_context_parallel_ranks_read_the_same_samples() -> None:
    ranks = run_distributed(read_everything, CONTEXT * RANKS, engine="megatron")
    assert sorted(rank["context"] for rank in ranks) == [0, 0, 1, 1]
    first, second = (
        [rank["samples"] for rank in ranks if rank["context"] == number]
        for number in range(CONTEXT)
    )
    assert first == second
    everything = [sample for rank in first for cluster in rank for sample in cluster]
    assert sorted(everything) == list(range(TOTAL))
    # a step's samples, by which a cluster that comes back is told where the others are
    assert {rank["counted"] for rank in ranks} == {MICRO_BATCHES * MICRO_BATCH * RANKS}
