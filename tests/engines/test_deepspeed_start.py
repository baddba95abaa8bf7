"""What a start sends under DeepSpeed: nothing of weights that are equal, or about to be loaded."""

from __future__ import annotations

import io
import logging
from datetime import timedelta
from typing import Any

import pytest
import torch

import dsx
from tests.distributed import run_distributed
from tests.engines.engines import quiet, weights
from tests.engines.resumes import (
    PLACES,
    ROWS,
    RankInfo,
    differences,
    end,
    micro_batches,
    snapshot,
    take_step,
    train,
)
from tests.engines.resumes import build as build_engine
from tests.installed import needs

pytestmark = [needs("deepspeed"), pytest.mark.ci]

ROW = ROWS["eager"]._replace(last_step=3, stops=(2,))
LITTLE = 10_000  # bytes


def told(engine: Any) -> dict[str, Any]:
    begun = engine.dsx.loop.beginning.begun
    return {
        "is open": engine.dsx.loop.beginning.is_open,
        "sent": begun.bytes_sent,
        "received": begun.bytes_received,
        "apart": begun.apart,
    }


def use(engine: Any, how: str) -> None:
    """Use an engine for the first time."""
    if how == "averaged":
        with engine.dsx.averaged():
            pass
    elif how == "module":
        with torch.no_grad():
            engine.module(*micro_batches(engine, 1)[0])
    else:
        take_step(engine, 1)


def start_in_many_ways(place: RankInfo, base: str) -> dict[str, Any]:
    quiet()
    log = io.StringIO()
    logging.getLogger("dsx").addHandler(logging.StreamHandler(log))
    found: dict[str, Any] = {}
    kept = train(ROW, place, base, [2])

    equal = build_engine(ROW, place, seed=0)
    found["equal"] = told(equal)
    start = weights(equal)
    take_step(equal, 1)
    after_a_step = snapshot(equal)
    end(equal)

    loaded = build_engine(ROW, place)
    found["before loading"] = told(loaded)
    loaded.load_checkpoint(base, tag="at_2")
    found["loaded"] = told(loaded)
    found["differs from what was saved"] = differences(snapshot(loaded), kept["2"])
    take_step(loaded, 3)
    found["trained on"] = told(loaded)
    found["differs at the end"] = differences(snapshot(loaded), kept["end"])
    end(loaded)

    for how in ("step", "averaged", "module"):
        unequal = build_engine(ROW, place)
        before = weights(unequal)
        found[f"{how}: own until then"] = all(torch.equal(before[n], w) for n, w in start.items())
        if how == "module" and unequal.pipeline_parallelism:
            with pytest.raises(RuntimeError, match="a stage of the pipeline was called on its own"):
                unequal.module(torch.zeros(1, 36))
            unequal.dsx.settle()
        else:
            use(unequal, how)
        found[how] = told(unequal)
        if how == "step":
            found["differs after a step"] = differences(snapshot(unequal), after_a_step)
        else:
            after = weights(unequal)
            found[f"{how}: all agree"] = all(torch.equal(after[n], w) for n, w in start.items())
        end(unequal)

    read = build_engine(ROW, place)
    read.module.state_dict()
    found["warned"] = log.getvalue().count("this cluster's weights are being read while")
    read.dsx.settle()
    read.module.state_dict()
    found["warned again"] = log.getvalue().count("this cluster's weights are being read while")
    end(read)
    found["numel"] = sum(w.numel() for w in start.values())
    return found


@pytest.mark.parametrize("name", ["zero0", "zero1, bf16", "zero3, bf16", "pipeline, zero1"])
def test_only_what_differs_is_sent_and_only_where_it_is_used(name: str, tmp_path: Any) -> None:
    place = PLACES[name]
    results = run_distributed(
        start_in_many_ways, place.num_ranks, place, str(tmp_path), timeout_seconds=240
    )
    for rank, found in enumerate(results):
        cluster = rank // (place.num_ranks // 2)
        little = {"equal": False, "before loading": True, "loaded": False, "trained on": False}
        for when, is_open in little.items():
            assert found[when]["sent"] < LITTLE and found[when]["received"] == 0, when
            assert found[when]["is open"] == is_open, when
        assert found["equal"]["apart"] == [] != found["before loading"]["apart"]
        assert found["differs from what was saved"] == found["differs at the end"] == []
        for how in ("step", "averaged", "module"):
            assert found[f"{how}: own until then"] == (cluster == 0)
            assert not found[how]["is open"]
            given, got = found[how]["sent"] > LITTLE, found[how]["received"] > LITTLE
            assert (given, got) == (cluster == 0, cluster == 1)
        assert found["differs after a step"] == []
        assert found["averaged: all agree"] and found["module: all agree"]
        assert (found["warned"], found["warned again"]) == (1, 1)
        if place.num_stages == 1:
            assert results[-1]["step"]["received"] == 4 * found["numel"]


def use_on_one_rank() -> str:
    quiet()
    place = PLACES["zero1"]
    engine = build_engine(ROW, place)
    if engine.global_rank:
        return ""
    group = engine.dsx._gathering._in_cluster._group
    group.set_timeout(timedelta(seconds=2))  # its own is above what a whole exchange may take
    with pytest.raises(dsx.PeerLost) as lost, torch.no_grad():
        engine.module(*micro_batches(engine, 1)[0])
    return str(lost.value)


def test_a_forward_on_one_rank_ends_with_what_to_do() -> None:
    said = run_distributed(use_on_one_rank, PLACES["zero1"].num_ranks)
    for message in said[::2]:
        assert "call engine.dsx.settle() on all ranks before a forward on one of them" in message
        assert "rank 0 waits for the other 1 rank(s) of cluster" in message
        assert "has not come within" in message
