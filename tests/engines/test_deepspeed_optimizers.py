"""Inner optimizers other than Adam: their state is kept as it is, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo

from dsx.engines.deepspeed.parameters import stepping_optimizer
from tests.distributed import run_distributed
from tests.engines.engines import Kind, build_engine, quiet, train_step
from tests.engines.resumes import differences, end, snapshot
from tests.installed import needs

pytestmark = needs("deepspeed")

STOP, LAST = 6, 10  # of H = 4, tau = 2: transfers are under way at the stop
FIRST = [Kind(1, "fp32", "one", "muon"), Kind(2, "bf16", "one", "int8")]
MORE = {
    "muon": [*(Kind(stage, "fp32", "one", "muon") for stage in range(4))],
    "muon, bf16": [*(Kind(stage, "bf16", "one", "muon") for stage in range(4))],
    "int8": [*(Kind(stage, "fp32", "one", "int8") for stage in range(4))],
    "shampoo": [*(Kind(stage, "fp32", "one", "shampoo") for stage in range(4))],
    "other methods": [
        Kind(1, "fp32", "one", "shampoo", "co2"), Kind(1, "fp32", "one", "muon", "eager")
    ],
}  # fmt: skip


def stop_and_resume(kind: Kind, base: str) -> tuple[list[str], list[str], list[str]]:
    """Return what the optimizer keeps, and what differs behind the load and at the end."""
    engine = build_engine(kind)
    kept: dict[str, Any] = {}
    for step in range(1, LAST + 1):
        train_step(engine, step)
        if step == STOP:
            kept = snapshot(engine)
            engine.save_checkpoint(base, tag="a")
    expected = snapshot(engine)
    end(engine)
    engine = build_engine(kind)
    engine.load_checkpoint(base, tag="a")
    loaded = differences(as_kept(snapshot(engine), kept), kept)
    for step in range(STOP + 1, LAST + 1):
        train_step(engine, step)
    ended = differences(as_kept(snapshot(engine), expected), expected)
    keys = {key for state in stepping_optimizer(engine).state.values() for key in state}
    engine.dsx.finish()
    end(engine)
    return sorted(keys), loaded, ended


def as_kept(held: dict[str, Any], kept: dict[str, Any]) -> dict[str, Any]:
    """Undo that torch loads bf16 momenta as fp32, of the same values, as DeepSpeed itself does."""
    return {
        name: value.to(kept[name].dtype) if "momentum_buffer" in name else value
        for name, value in held.items()
    }


def stop_and_resume_all(kinds: list[Kind], base: str) -> list[Any]:
    quiet()
    torch._dynamo.config.disable = True  # Muon's own compiles for minutes
    return [stop_and_resume(kind, f"{base}/{index}") for index, kind in enumerate(kinds)]


@pytest.mark.ci
@pytest.mark.parametrize(
    "kinds",
    [FIRST, *(pytest.param(kinds, marks=pytest.mark.slow) for kinds in MORE.values())],
    ids=["two", *MORE],
)
def test_what_an_optimizer_keeps_is_resumed_bit_for_bit(kinds: list[Kind], tmp_path: Path) -> None:
    keeps = {
        "muon": {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"},
        "int8": {"codes", "scales", "step"},
        "shampoo": {"statistics"},
    }
    everyone = run_distributed(stop_and_resume_all, 4, kinds, str(tmp_path), timeout_seconds=280)
    for index, kind in enumerate(kinds):
        for results in everyone:
            keys, loaded, ended = results[index]
            assert set(keys) == keeps[kind.optimizer], kind
            assert (loaded, ended) == ([], []), kind
