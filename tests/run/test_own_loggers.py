"""What a Trainer's own loggers are handed: the figures of dsx beside its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dsx.run.hugging_face.callback import make_callbacks
from dsx.run.own_loggers import figures_for_loggers
from dsx.telemetry.progress import Progress
from tests.installed import needs


def handle() -> Any:
    progress = Progress(0, 0.0, speaks=False)
    progress.last_step = {"step": 7, "seconds": 0.5, "utilization": 0.75, "bytes_sent": 1000}
    return SimpleNamespace(progress=progress, step=7, log_step=lambda **fields: None)


def test_names_are_those_of_other_sinks() -> None:
    assert figures_for_loggers(handle()) == {
        "dsx/step/seconds": 0.5, "dsx/step/utilization": 0.75, "dsx/step/bytes_sent": 1000.0,
    }  # fmt: skip
    assert figures_for_loggers(SimpleNamespace(progress=Progress(0, 0.0, speaks=False))) == {}  # type: ignore[arg-type]


@needs("transformers")
@pytest.mark.parametrize(("logs", "has_them"), [({"loss": 2.0}, True), ({"eval_loss": 2.0}, False)])
def test_loggers_behind_ours_have_them(logs: dict[str, float], has_them: bool) -> None:
    from transformers import TrainerCallback, TrainerControl, TrainerState, trainer_callback

    seen: list[dict[str, float]] = []

    class TheirLogger(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            seen.append(dict(logs))

    first, _ = make_callbacks(
        trainer_callback, None, lambda trainer: handle(), lambda trainer: None
    )
    handler = trainer_callback.CallbackHandler([first, TheirLogger()], None, None, None, None)
    handler.on_log(SimpleNamespace(), TrainerState(), TrainerControl(), dict(logs))
    assert seen[-1].items() >= logs.items()
    assert ("dsx/step/utilization" in seen[-1]) == has_them
