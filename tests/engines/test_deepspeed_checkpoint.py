"""DeepSpeed checkpoints carry the outer state: a resumed run equals an uninterrupted one."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from tests.distributed import run_distributed
from tests.engines.engines import (
    ACCUMULATION,
    GROUPS,
    Kind,
    build_engine,
    ds_config,
    make_optimizer,
    quiet,
    train_step,
    weights,
)
from tests.installed import needs
from tests.telemetry.trace.runs import read_timeline
from tests.tiny import CASES, TinyNet

pytestmark = needs("deepspeed")

NUM_STEPS = 12
SAVED_UNDER_WAY = (0, 5), (1, 6)  # fragment, step: at the save the mean is there, or made again
PERIOD = (5, 6, 7, 8)  # of H = 4, transfers in flight at most of them


class Position:
    """The smallest thing with a position."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


RESUMED = [
    Kind(0, "fp32", "two", "adamw"),
    Kind(1, "fp32", "two", "adamw"),
    Kind(1, "bf16", "two", "adamw"),
    Kind(1, "fp32", "two", "adamw", "eager"),
    Kind(1, "fp32", "two", "adamw", "co2"),
    Kind(2, "bf16", "two", "adamw", zero=("offload",)),
    Kind(3, "fp32", "two", "adamw", zero=("none_persistent",)),
    Kind(3, "bf16", "two", "adamw", zero=("sub_groups", "some_persistent")),
]


def stop_and_resume(base: str, kind: Kind, stops: tuple[int, ...]) -> dict[str, Any]:
    engine = build_engine(kind)
    position = Position()
    engine.dsx.track(data=position)
    in_flight = []
    for step in range(1, NUM_STEPS + 1):
        train_step(engine, step)
        position.value += 1
        if step in stops:
            in_flight.append(len(engine.dsx.loop.in_flight))
            engine.save_checkpoint(base, tag=f"step{step}")
    expected = weights(engine)
    engine.dsx.close()
    engine.destroy()
    equal, positions = [], []
    for stop in (None, *stops[:-1]):  # None: the newest
        resumed = build_engine(kind)
        position = Position()
        resumed.dsx.track(data=position)
        path, _ = resumed.load_checkpoint(base, tag=f"step{stop}" if stop else None)
        assert path is not None
        positions.append(position.value)
        for step in range(resumed.dsx.step + 1, NUM_STEPS + 1):
            train_step(resumed, step)
        equal.append(all(torch.equal(w, expected[name]) for name, w in weights(resumed).items()))
        resumed.dsx.close()
        resumed.destroy()
    return {"equal": equal, "positions": positions, "in_flight": in_flight}


def stop_and_resume_all(base: str, stops: tuple[int, ...]) -> list[dict[str, Any]]:
    quiet()
    return [stop_and_resume(f"{base}/{index}", kind, stops) for index, kind in enumerate(RESUMED)]


@pytest.mark.slow  # test_deepspeed_resume.py resumes every preset; this one every kind of engine
@pytest.mark.parametrize("stops", [(6, 8), PERIOD], ids=str)
def test_resume_is_bit_for_bit(stops: tuple[int, ...], tmp_path: Path) -> None:
    for results in run_distributed(
        stop_and_resume_all, 4, str(tmp_path), stops, timeout_seconds=280
    ):
        for kind, result in zip(RESUMED, results, strict=True):
            assert result["equal"] == [True] * len(stops), kind
            assert result["positions"] == [8, *stops[:-1]]
            assert max(result["in_flight"]) >= 1
    for index in range(len(RESUMED)):
        base = tmp_path / str(index)
        assert (base / "cluster_0" / "latest").read_text() == "step8"
        assert (base / "cluster_1" / "step8" / "dsx.json").exists()


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_with_metrics(base: str) -> bool:
    quiet()
    config = ds_config(1, "fp32", "streaming_diloco")
    config["dsx"]["metrics"] = {"dir": f"{base}/metrics", "trace": True}
    world = dsx.init_distributed(config)
    for first_step, last_step in ((0, 8), (6, 12)):
        model = TinyNet(0)
        optimizer = make_optimizer("sgd", GROUPS["two"](model))
        engine = dsx.initialize(model=model, optimizer=optimizer, config=config)[0]
        if first_step:
            engine.load_checkpoint(base)
        for step in range(first_step + 1, last_step + 1):
            train_step(engine, step)
            engine.dsx.log_step(loss=float(step))
            if step == 6:
                engine.save_checkpoint(base)
        engine.dsx.finish()
        engine.dsx.close()
    return world.rank == 0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("recorded")
    assert run_distributed(train_with_metrics, 4, str(base), timeout_seconds=240)
    return base / "metrics"


def test_a_trace_shows_each_step_once_and_survives_a_resume(recorded: Path) -> None:
    timeline = read_timeline(recorded)
    assert timeline.ranks == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for rank in timeline.ranks:
        own = [span for span in timeline.spans if span.rank == rank]
        counts = Counter((span.name, span.step) for span in own)
        for step in range(1, 13):
            assert counts["forward", step] == counts["backward", step] == ACCUMULATION
            assert counts["reduce gradients", step] == ACCUMULATION
            assert counts["optimizer step", step] == 1
        steps = {s.step: s for s in own if s.name == "optimizer step"}
        for span in own:
            if span.name in ("launch", "apply") and span.step < 12:  # the rest is drained
                assert steps[span.step].start <= span.start <= span.end <= steps[span.step].end
    for cluster, name in enumerate(("metrics.jsonl", "metrics.cluster_1.jsonl")):
        syncs = [r for r in records(recorded / name) if r["kind"] == "sync"]
        sent = {(r["fragment"], r["launched_step"]): r["bytes_sent"] for r in syncs}
        for kind in ("transfer", "apply"):
            shown: Counter[tuple[int, int]] = Counter()
            for span in timeline.spans:
                if span.track[0] == cluster and span.name == kind:
                    shown[span.facts["fragment"], span.facts["launched"]] += span.facts["bytes"]
            for launch in SAVED_UNDER_WAY:  # a header of each owner, at least
                assert HEADER_BYTES <= sent[launch] <= shown.pop(launch)
            assert dict(shown) == {k: v for k, v in sent.items() if k not in SAVED_UNDER_WAY}


def test_metrics_are_for_the_cluster_and_survive_a_resume(recorded: Path) -> None:
    recipe = CASES["streaming_diloco"].recipe
    numel = {n: p.numel() for n, p in TinyNet().named_parameters()}
    for name in ("metrics.jsonl", "metrics.cluster_1.jsonl"):
        written = records(recorded / name)
        steps = [r for r in written if r["kind"] == "step"]
        assert [r["preset"] for r in written if r["kind"] == "start"] == ["streaming_diloco"] * 2
        syncs = [r for r in written if r["kind"] == "sync"]
        assert [(r["step"], r["loss"]) for r in steps] == [(t, float(t)) for t in range(1, 13)]
        launches = sorted((r["fragment"], r["launched_step"]) for r in syncs)
        assert launches == [
            (0, 1),
            (0, 5),
            (0, 9),
            (1, 2),
            (1, 6),
            (1, 10),
            (2, 4),
            (2, 8),
            (2, 12),
        ]
        for record in syncs:
            elements = sum(numel[n] for n in recipe.fragments[record["fragment"]])
            assert record["numel"] == elements
            payload = record["bytes_sent"] - elements * 4  # C = 2: each element once each way
            ranks = (1, 2)  # that own some
            beside = [n * (HEADER_BYTES + COMMIT_BYTES) for n in ranks]
            if (record["fragment"], record["launched_step"]) in SAVED_UNDER_WAY:
                handed_over = [n * HEADER_BYTES for n in ranks]
                assert record["bytes_sent"] in handed_over or payload in beside
            else:
                assert payload in beside
            assert record["mean_norm"] > 0 and record["pseudo_gradient_norm"] > 0
        assert written[-1]["kind"] == "finish"
        assert written[-1]["bytes_sent"] == sum(r["bytes_sent"] for r in syncs)


class Trap:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._path,)


def load_what_is_not_there(base: str) -> list[str]:
    quiet()
    engine = build_engine((1, "fp32", "one", "sgd", "diloco"))
    messages = []
    for tag in (None, "step99"):
        try:
            engine.load_checkpoint(base, tag=tag)
        except FileNotFoundError as error:
            messages.append(str(error))
    train_step(engine, 1)
    engine.save_checkpoint(base, tag="step1")
    (Path(base) / f"cluster_{engine.dsx.cluster_id}" / "step1").joinpath(
        f"dsx_rank_{engine.global_rank:05d}.safetensors"
    ).unlink()
    for kwargs in ({"tag": "step1"}, {"tag": "step1", "load_optimizer_states": False}):
        try:
            engine.load_checkpoint(base, **kwargs)
        except (FileNotFoundError, ValueError) as error:
            messages.append(str(error))
    mine = Trap(f"{base}/sprung") if engine.dsx.cluster_id == 1 else 1
    engine.save_checkpoint(base, tag="trap", client_state={"mine": mine})
    try:
        engine.load_checkpoint(base, tag="trap")
    except ValueError as error:
        messages.append(str(error))
    return messages


def test_missing_checkpoints_are_hard_errors(tmp_path: Path) -> None:
    for messages in run_distributed(load_what_is_not_there, 4, str(tmp_path), timeout_seconds=240):
        assert len(messages) == 5
        assert "no complete checkpoint that all clusters hold" in messages[0]
        assert "no complete checkpoint 'step99' that all clusters hold" in messages[1]
        assert "cluster 0: " in messages[2] and ".safetensors is gone; load" in messages[2]
        assert "without optimizer states" in messages[3]
        assert messages[4].startswith("cluster 1: ") and "posix.mkdir" in messages[4]
    assert not (tmp_path / "sprung").exists()
