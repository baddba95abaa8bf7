"""What a start sends under Megatron: digests, and what differs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.engines.megatrons import Kind, build_engine, needs_megatron, whole_weights

pytestmark = [needs_megatron, pytest.mark.ci]

LITTLE = 10_000  # bytes
KINDS = [
    Kind(pipeline=2, is_tied=True),
    Kind(tensor=2, precision="bf16"),
    Kind(is_sharded=True, precision="bf16"),
]


def start_equal_and_unequal(kinds: list[Kind]) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for kind in kinds:
        found: dict[str, Any] = {}
        for name, seed in (("equal", 0), ("unequal", None)):
            engine = build_engine(kind, seed)
            begun = engine.handle.loop.beginning.begun
            found[name] = begun.bytes_sent, begun.bytes_received, begun.apart
            found[f"{name}: weights"] = {n: w.numpy() for n, w in whole_weights(engine).items()}
            found["numel"] = sum(engine.handle.loop.adapter.fragment_numel)
            found["cluster"] = engine.handle.cluster_id
            engine.handle.close()
        results.append(found)
    return results


def test_equal_weights_are_not_sent_and_others_are_once() -> None:
    results = run_distributed(
        start_equal_and_unequal, 4, KINDS, engine="megatron", timeout_seconds=240
    )
    for found in (one for rank in results for one in rank):
        sent, received, apart = found["equal"]
        assert (received, apart) == (0, []) and 0 < sent < LITTLE
        sent, received, apart = found["unequal"]
        assert apart
        assert (sent > LITTLE, received > LITTLE) == (found["cluster"] == 0, found["cluster"] == 1)
        ours, theirs = found["unequal: weights"], found["equal: weights"]
        assert all((ours[name] == theirs[name]).all() for name in theirs)
    for number, kind in enumerate(KINDS):
        if kind.pipeline == 1:  # all of a stage's shards together, each once
            one = results[-1][number]
            assert one["unequal"][1] == 4 * one["numel"]
