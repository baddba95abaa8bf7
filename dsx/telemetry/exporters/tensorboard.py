"""TensorBoard's events, in `tensorboard/cluster_<m>` of the run's folder.

A run that goes on from a checkpoint marks the steps that it takes again: TensorBoard drops them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dsx.telemetry.exporters.sink import Kind, Start, not_installed

NAME = "tensorboard"


class _Board:
    def __init__(self, open_writer: Callable[..., Any], start: Start) -> None:
        beyond = start.beyond
        self._writer = open_writer(str(start.path(NAME)), purge_step=beyond)

    def describe(self, record: Mapping[str, Any]) -> None:
        """Take nothing: its numbers are written as those of others are."""

    def write(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Add each number as a scalar."""
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step, walltime=time)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def find() -> Kind:
    """Return the kind; ModuleNotFoundError without the library."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ModuleNotFoundError(not_installed(NAME, "tensorboard", "tensorboard")) from error
    return Kind(NAME, lambda start: _Board(SummaryWriter, start))
