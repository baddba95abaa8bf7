"""DeepSpeed checkpoints carry the outer state: a resumed run equals an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.backends.test_deepspeed import build_engine, quiet, train_step
from tests.distributed import run_distributed

pytest.importorskip("deepspeed")

NUM_STEPS = 12
STOPS = (5, 6, 7, 8)  # one period of H = 4, transfers in flight at most of them


class Position:
    """The smallest thing with a position."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]


def weights(engine: Any) -> list[torch.Tensor]:
    return [p.detach().clone() for p in engine.module.parameters()]


def stop_and_resume(base: str, stage: int, precision: str) -> dict[str, Any]:
    quiet()
    case = (stage, precision, "two", "adamw", "streaming_diloco")
    engine = build_engine(case)
    position = Position()
    engine.dsx.track(data=position)
    in_flight = []
    for step in range(1, NUM_STEPS + 1):
        train_step(engine, step)
        position.value += 1
        if step in STOPS:
            in_flight.append(len(engine.dsx.loop.in_flight))
            engine.save_checkpoint(base, tag=f"step{step}")
    expected = weights(engine)
    equal, positions = [], []
    for stop in (None, *STOPS):  # None: the newest
        resumed = build_engine(case)
        position = Position()
        resumed.dsx.track(data=position)
        path, _ = resumed.load_checkpoint(base, tag=f"step{stop}" if stop else None)
        assert path is not None
        positions.append(position.value)
        for step in range(resumed.dsx.step + 1, NUM_STEPS + 1):
            train_step(resumed, step)
        pairs = zip(weights(resumed), expected, strict=True)
        equal.append(all(torch.equal(a, b) for a, b in pairs))
    return {"equal": equal, "positions": positions, "in_flight": in_flight}


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_resume_is_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    results = run_distributed(
        stop_and_resume, 4, str(tmp_path), stage, precision, timeout_seconds=120
    )
    for result in results:
        assert result["equal"] == [True] * 5
        assert result["positions"] == [8, 5, 6, 7, 8]
        assert max(result["in_flight"]) >= 1
    assert (tmp_path / "cluster_0" / "latest").read_text() == "step8"
    assert (tmp_path / "cluster_1" / "step8" / "dsx.json").exists()


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
    return messages


def test_missing_checkpoints_are_hard_errors(tmp_path: Path) -> None:
    for messages in run_distributed(load_what_is_not_there, 4, str(tmp_path), timeout_seconds=90):
        assert len(messages) == 4
        assert "no complete checkpoint that all clusters hold" in messages[0]
        assert "no complete checkpoint 'step99' that all clusters hold" in messages[1]
        assert "no outer state at" in messages[2]
        assert "without optimizer states" in messages[3]
