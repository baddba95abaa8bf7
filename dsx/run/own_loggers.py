"""What a framework's own loggers have of dsx: its last step, under the names of docs/loggers.md."""

from __future__ import annotations

from dsx.telemetry.exporters.sink import numbers_of
from dsx.training.handle import Handle


def figures_for_loggers(handle: Handle) -> dict[str, float]:
    """Return the numbers of the step just taken, such as "dsx/step/utilization"."""
    numbers = numbers_of({"kind": "step", **handle.progress.last_step})
    return {f"dsx/{name}": float(value) for name, value in numbers.items()}
