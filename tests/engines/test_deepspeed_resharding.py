"""A run goes on with another ZeRO stage, other ranks, other clusters; over real engines."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dsx.cli import app
from tests.distributed import run_distributed
from tests.engines.engines import (
    Kind,
    OddNet,
    build_engine,
    ds_config,
    engine_arguments,
    quiet,
    train_step,
    weights,
)
from tests.installed import needs

pytestmark = needs("deepspeed")

STOP, NUM_STEPS = 6, 10  # H = 4, tau = 2: transfers are in flight at the stop
KINDS = {
    "zero1": Kind(1, "fp32", "two", "adamw"),
    "zero3": Kind(3, "fp32", "one", "adamw", zero=("none_persistent",)),
    "zero0": Kind(0, "fp32", "two", "adamw"),
}
UNIVERSAL = {"checkpoint": {"load_universal": True}}


def convert(directory: Path) -> None:
    from deepspeed.checkpoint.ds_to_universal import main

    main(
        argparse.Namespace(
            input_folder=str(directory),
            output_folder=f"{directory}_universal",
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )


def anchors(engine: Any) -> dict[str, dict[int, float]]:
    """Every element of this rank's anchors by parameter and place."""
    found: dict[str, dict[int, float]] = {}
    loop = engine.dsx.loop
    for fragment, anchor in zip(loop.adapter.fragments, loop.state.anchor, strict=True):
        for slot in fragment.layout:
            values = anchor[slot.offset : slot.offset + slot.numel].tolist()
            places = found.setdefault(slot.name, {})
            places.update({slot.start + i: value for i, value in enumerate(values)})
    return found


def merged(parts: list[dict[str, dict[int, float]]]) -> dict[str, dict[int, float]]:
    whole: dict[str, dict[int, float]] = {}
    for part in parts:
        for name, places in part.items():
            whole.setdefault(name, {}).update(places)
    return whole


def as_lists(engine: Any) -> dict[str, list[float]]:
    return {name: w.flatten().tolist() for name, w in weights(engine).items()}


def end(engine: Any) -> None:
    engine.dsx.close()
    engine.destroy()


def save_and_go_on(base: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Save and convert at STOP; go on, uninterrupted, and again as ZeRO-2; try ZeRO-3."""
    quiet()
    results: dict[str, Any] = {}
    for name in names:
        kind = KINDS[name]
        engine = build_engine(kind)
        for step in range(1, NUM_STEPS + 1):
            train_step(engine, step)
            if step == STOP:
                engine.save_checkpoint(f"{base}/{name}")
                results[name] = {"in_flight": len(engine.dsx.loop.in_flight)}
                results[name]["anchors"] = anchors(engine)
                with engine.dsx.averaged():
                    results[name]["averaged"] = as_lists(engine)
                if kind.stage and engine.global_rank == 0:
                    cluster = Path(base) / name / f"cluster_{engine.dsx.cluster_id}"
                    convert(cluster / f"global_step{STOP}")
        results[name]["weights"] = as_lists(engine)
        end(engine)
    torch.distributed.barrier()
    engine = build_engine(KINDS["zero1"]._replace(stage=2), **UNIVERSAL)
    engine.load_checkpoint(f"{base}/zero1")
    results["as zero2"] = {"in_flight": len(engine.dsx.loop.in_flight)}
    for step in range(STOP + 1, NUM_STEPS + 1):
        train_step(engine, step)
    results["as zero2"]["weights"] = as_lists(engine)
    end(engine)
    engine = build_engine(KINDS["zero1"]._replace(stage=3), **UNIVERSAL)
    with pytest.raises(RuntimeError) as refusal:
        engine.load_checkpoint(f"{base}/zero1")
    results["refusal"] = str(refusal.value)
    end(engine)
    return results


def clusters_of_one(base: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Four clusters of one rank go on where two clusters of two were; engines without dsx, too."""
    import deepspeed

    quiet()
    results: dict[str, Any] = {}
    for name in names:
        changes = dict(UNIVERSAL) if KINDS[name].stage else {}
        config = ds_config(0, "fp32", KINDS[name].preset)["dsx"]
        config["clusters"]["num_clusters"] = 4
        engine = build_engine(KINDS[name], dsx=config, **changes)
        engine.load_checkpoint(f"{base}/{name}")
        result = {"anchors": anchors(engine), "in_flight": len(engine.dsx.loop.in_flight)}
        result["step"] = engine.dsx.step
        for step in range(STOP + 1, NUM_STEPS + 1):
            train_step(engine, step)
        engine.dsx.finish()
        results[name] = {**result, "at the end": anchors(engine)}
        end(engine)
        if KINDS[name].stage:
            arguments = engine_arguments(KINDS[name], **UNIVERSAL)
            engine = deepspeed.initialize(**arguments)[0]
            engine.load_checkpoint(f"{base}/{name}/exported")
            results[name]["exported"] = as_lists(engine)
            train_step(engine, 1, cluster=0)
            engine.destroy()
    return results


def check_export(checkpoints: Path, averaged: dict[str, list[float]], stage: int) -> None:
    out = checkpoints / "exported"
    said = CliRunner().invoke(app, ["export", str(checkpoints), "--out", str(out)])
    assert said.exit_code == 0, said.output
    assert "2 transfer(s) that were in flight" in said.output
    model = OddNet(1)
    model.load_state_dict(load_file(out / "model.safetensors"))
    assert {n: p.flatten().tolist() for n, p in model.named_parameters()} == averaged
    for held in checkpoints.rglob("*_model_states.pt"):
        held.chmod(0o444)
    arguments = ["export", str(checkpoints), "--out", str(out), "--format", "universal"]
    said = CliRunner().invoke(app, arguments)
    assert said.exit_code == (0 if stage else 2), said.output
    assert stage or "has no *_optim_states.pt" in said.output
    for whole in out.rglob("mp_rank_*_model_states.pt"):
        assert whole.stat().st_mode & 0o200, "as read-only as the checkpoint"


def check(base: Path, names: tuple[str, ...]) -> None:
    first = run_distributed(save_and_go_on, 4, str(base), names, timeout_seconds=200)
    for result in first:
        assert result["as zero2"]["in_flight"] == result["zero1"]["in_flight"] == 2
        for name, expected in result["zero1"]["weights"].items():
            assert result["as zero2"]["weights"][name] == pytest.approx(expected, abs=1e-6)
        assert "between ZeRO-3, 1 or 2, and 0 DeepSpeed converts nothing" in result["refusal"]
    for name in names:
        check_export(base / name, first[0][name]["averaged"], KINDS[name].stage)
    second = run_distributed(clusters_of_one, 4, str(base), names, timeout_seconds=200)
    for name in names:
        whole = merged([result[name]["anchors"] for result in first[:2]])
        for result in second:
            assert result[name]["anchors"] == whole
            assert (result[name]["in_flight"], result[name]["step"]) == (2, STOP)
            if KINDS[name].stage:
                assert result[name]["exported"] == first[0][name]["averaged"]
            assert result[name]["at the end"] == second[0][name]["at the end"] != whole


@pytest.mark.ci
def test_another_stage_and_other_clusters(tmp_path: Path) -> None:
    check(tmp_path, ("zero1",))


@pytest.mark.slow
def test_other_clusters_from_every_stage(tmp_path: Path) -> None:
    check(tmp_path, ("zero1", "zero3", "zero0"))


def save_for_ever(base: str, seconds: float) -> None:
    """Save after every step; die some time after the fifth."""
    quiet()
    engine = build_engine(KINDS["zero1"])
    step = 0
    while True:
        step += 1
        train_step(engine, step)
        engine.save_checkpoint(base, tag=f"step{step % 4}")
        if step == 5:
            kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
            threading.Timer(seconds, kill).start()


def load_newest(base: str) -> int:
    quiet()
    engine = build_engine(KINDS["zero1"])
    engine.load_checkpoint(base)
    train_step(engine, engine.dsx.step + 1)
    end(engine)
    return engine.dsx.step


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.31, 0.74, 1.13])
def test_killed_while_saving(seconds: float, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="died|PeerLost"):
        run_distributed(save_for_ever, 4, str(tmp_path), seconds, timeout_seconds=120)
    steps = run_distributed(load_newest, 4, str(tmp_path), timeout_seconds=90)
    assert len(set(steps)) == 1 and steps[0] >= 5
