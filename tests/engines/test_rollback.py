"""Training that diverges goes back to the last good checkpoint, in all clusters at one step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import dsx
from dsx.checkpoint.tags import complete_tags
from tests.checkpoint.test_choice import choose
from tests.distributed import run_distributed
from tests.engines.engines import build_engine, ds_config, quiet, train_step, weights
from tests.engines.test_deepspeed_checkpoint import Position
from tests.engines.test_deepspeed_newest_good import Said
from tests.installed import needs
from tests.telemetry.trace.runs import block
from tests.tiny import TinyNet, batch

pytestmark = [needs("deepspeed"), pytest.mark.ci]
NUM_STEPS, BAD = 24, 9


def diverge(base: str, what: str, data: str) -> dict[str, Any]:
    """At step BAD cluster 1 tells of a loss, or has moments, that are not good."""
    quiet()
    said = Said()
    config = ds_config(1, "fp32", "diloco")["dsx"] | {
        "schedule": {"interval": 2},
        "divergence": {"max_loss": 50.0, "max_rollbacks": 2, "data": data},
        "metrics": {"dir": f"{base}/run"},
    }
    engine = build_engine((1, "fp32", "one", "adamw", "diloco"), dsx=config)
    handle, position = engine.dsx, Position()
    handle.track(data=position)
    kept: dict[int, dict[str, torch.Tensor]] = {}
    gone: list[tuple[int, int, bool]] = []
    taken = 0
    while handle.step < NUM_STEPS:
        before = handle.step
        if taken + 1 == BAD and what == "moments" and handle.cluster_id == 1:
            for state in engine.optimizer.optimizer.state.values():
                state["exp_avg"].fill_(torch.nan)
        train_step(engine, before + 1)
        taken, position.value = taken + 1, position.value + 1
        if handle.step <= before:  # gone back
            same = all(torch.equal(w, kept[handle.step][n]) for n, w in weights(engine).items())
            gone.append((before + 1, handle.step, same))
            continue
        is_bad = what == "loss" and handle.cluster_id == 1 and BAD <= taken < BAD + 3
        handle.log_step(loss=99.0 if is_bad else 1.0)
        if handle.step % 4 == 0:
            kept[handle.step] = weights(engine)
            engine.save_checkpoint(f"{base}/checkpoints", tag=f"step{handle.step}")
    handle.finish()
    handle.close()
    finite = all(bool(w.isfinite().all()) for w in weights(engine).values())
    told = [line for line in said.lines if "gone back from step" in line]
    return {
        "gone": gone,
        "finite": finite,
        "position": position.value,
        "taken": taken,
        "told": told,
    }


@pytest.mark.parametrize(("what", "data"), [("loss", "go_on"), ("moments", "as_saved")])
def test_deepspeed_goes_back_in_place(what: str, data: str, tmp_path: Path) -> None:
    results = run_distributed(diverge, 4, str(tmp_path), what, data, timeout_seconds=240)
    ((at, to, is_same),) = results[0]["gone"]
    assert to == 8 and BAD + 2 <= at <= BAD + 9 and is_same
    for rank, result in enumerate(results):
        assert result["gone"] == [(at, to, True)] and result["finite"]
        assert result["taken"] == NUM_STEPS + at - to
        # the step that went back counts its batch after it
        assert result["position"] == (NUM_STEPS + 1 if data == "as_saved" else result["taken"])
        assert len(result["told"]) == (rank % 2 == 0)
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["starts"][-1]["rolled_back"]["from_step"] == at
    assert about["starts"][-1]["resumed_from"].endswith("step8")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    (back,) = [record for record in records if record["kind"] == "rollback"]
    assert (back["step"], back["from_step"]) == (8, at)


def diverge_in_a_script(base: str, who_knows_how: str) -> dict[str, Any]:
    config = block("diloco")
    config["dsx"] |= {
        "schedule": {"interval": 2},
        "divergence": {"max_loss": 50.0, "patience": 1, "max_rollbacks": 1},
    }
    world = dsx.init_distributed(config)
    model = TinyNet(world.cluster_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    handle = dsx.attach(model, optimizer, config=config)
    gone: list[tuple[int, int]] = []

    def load(directory: Path) -> None:
        found = torch.load(directory / "model.pt", weights_only=True)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        before = handle.step
        handle.load(directory)
        gone.append((before, handle.step))

    if who_knows_how == "all" or (who_knows_how == "one" and not world.cluster_id):
        handle.on_rollback(load)
    taken = 0
    try:
        while handle.step < 16:
            optimizer.zero_grad()
            model(*batch(world.cluster_id, handle.step + 1)).backward()
            optimizer.step()
            taken += 1
            handle.log_step(loss=99.0 if taken == BAD and world.cluster_id else 1.0)
            if handle.step % 4 == 0:
                own = Path(base) / f"{handle.step}" / f"{world.cluster_id}"
                own.mkdir(parents=True, exist_ok=True)
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save(saved, own / "model.pt")
                handle.save(own)
                handle.saved(own)
        handle.finish()
    except dsx.NonFiniteError as error:
        return {"gone": gone, "error": str(error)}
    return {"gone": gone, "error": ""}


@pytest.mark.parametrize("who_knows_how", ["all", "none", "one"])
def test_a_script_goes_back_by_its_callback_or_ends(who_knows_how: str, tmp_path: Path) -> None:
    results = run_distributed(diverge_in_a_script, 2, str(tmp_path), who_knows_how)
    assert results[0]["gone"] == results[1]["gone"]
    if who_knows_how == "all":
        ((at, to),) = results[0]["gone"]
        assert to == 8 and at > BAD and not results[0]["error"]
    else:
        lacking = "cluster 0, cluster 1" if who_knows_how == "none" else "cluster 1"
        for result in results:
            assert "cluster 1 has diverged: its loss is 99 at step 9" in result["error"]
            assert f"has not been called in {lacking}: start again" in result["error"]


def save_while_diverging(base: str, max_rollbacks: int) -> list[tuple[int, int]]:
    """Save at every step, and be killed as soon as training has gone back, or ends."""
    quiet()
    config = ds_config(1, "fp32", "diloco")["dsx"] | {
        "schedule": {"interval": 2},
        "divergence": {"max_loss": 50.0, "max_rollbacks": max_rollbacks},
        "checkpoints": {"keep": 2},
    }
    engine = build_engine((1, "fp32", "one", "adamw", "diloco"), dsx=config)
    handle = engine.dsx
    while handle.step < NUM_STEPS:
        before = handle.step
        try:
            train_step(engine, before + 1)
        except dsx.NonFiniteError:
            return [(before + 1, -1)]
        if handle.step <= before:
            return [(before + 1, handle.step)]
        is_bad = handle.cluster_id == 1 and handle.step >= BAD
        handle.log_step(loss=99.0 if is_bad else 1.0)
        engine.save_checkpoint(base, tag=f"step{handle.step}")
    return []


@pytest.mark.parametrize("max_rollbacks", [0, 1])
def test_what_was_saved_meanwhile_is_not_gone_on_from(max_rollbacks: int, tmp_path: Path) -> None:
    results = run_distributed(
        save_while_diverging, 4, str(tmp_path), max_rollbacks, timeout_seconds=240
    )
    ((at, to),) = results[0]
    assert to == (BAD - 1 if max_rollbacks else -1) and at >= BAD + 3
    assert results == [results[0]] * 4
    for cluster in range(2):
        held = complete_tags(tmp_path / f"cluster_{cluster}")
        bad = {tag for tag, manifest in held.items() if manifest["trouble"]}
        assert {f"step{n}" for n in range(BAD, at)} == bad
        assert {f"step{BAD - 1}", f"step{BAD - 2}"} <= set(held)
    assert choose(tmp_path).tag == f"step{BAD - 1}"
