"""Traces of Megatron: forward and backward by micro-batch and chunk, with stages and overlap."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.distributed import run_distributed
from tests.engines.megatrons import MICRO_BATCHES, Kind, build_engine, needs_megatron, train_step
from tests.telemetry.trace.runs import read_timeline

pytestmark = needs_megatron

KINDS = [
    Kind(tensor=2),
    Kind(pipeline=2, chunks=2),
    Kind(precision="bf16", is_sharded=True, overlaps=True),
]
NUM_STEPS = 6


def trace_all(base: str) -> int:
    for index, kind in enumerate(KINDS):
        metrics = {"dir": f"{base}/{index}", "trace": True}
        engine = build_engine(kind, metrics=metrics)
        for step in range(1, NUM_STEPS + 1):
            train_step(engine, step)
        engine.handle.finish()
        engine.handle.close()
    return NUM_STEPS


@pytest.mark.slow
def test_every_step_has_its_forwards_backwards_and_step(tmp_path: Path) -> None:
    run_distributed(trace_all, 4, str(tmp_path), timeout_seconds=240, engine="megatron")
    for index, kind in enumerate(KINDS):
        timeline = read_timeline(tmp_path / str(index))
        assert timeline.ranks == [(0, 0), (0, 1), (1, 0), (1, 1)]
        counts = Counter((span.rank, span.name, span.step) for span in timeline.spans)
        for rank in timeline.ranks:
            for step in range(1, NUM_STEPS + 1):
                passes = MICRO_BATCHES * kind.chunks
                assert counts[rank, "forward", step] == passes, (kind, rank, step)
                assert counts[rank, "backward", step] == passes, (kind, rank, step)
                assert counts[rank, "optimizer step", step] == 1
            assert any(name == "transfer" for at, name, _ in counts if at == rank)
