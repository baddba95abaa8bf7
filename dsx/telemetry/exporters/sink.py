"""A sink takes the numbers of a cluster's records, under the same names whatever shows them.

A name is the record's kind and its field, `step/utilization`; of a sync the fragment stands between
them, `sync/fragment_0/mean_norm`, and the stage of a pipeline that has several before that. Of
all links of a cluster there are the longest round trip and the bytes of all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_OF_ALL = ("time", "step", "cluster")


class Sink(Protocol):
    """What has been opened for one start of a run; used by one thread."""

    def describe(self, record: Mapping[str, Any]) -> None:
        """Take the first record, which says what runs."""
        ...

    def write(self, numbers: Mapping[str, float], step: int, time: float) -> None:
        """Take the numbers of a record of an inner step; `time` is in seconds since 1970."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


@dataclass(frozen=True)
class Start:
    """One start of a run, which a sink is opened for.

    `directory` is the run's folder; what lies there beyond `beyond` is taken again, None: nothing.
    """

    directory: Path
    cluster: int
    beyond: int | None

    @property
    def run(self) -> str:
        """What the run is called: its folder."""
        return self.directory.absolute().name

    def path(self, kind: str) -> Path:
        """Return where a sink of a kind writes, if it writes into the run's folder."""
        return self.directory / kind / f"cluster_{self.cluster}"


@dataclass(frozen=True)
class Kind:
    """A kind of sink: how it is opened, once its library has been found."""

    name: str
    open: Callable[[Start], Sink]


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name."""
    prefix = line["kind"]
    if prefix == "launch":  # it has no number that a chart would show
        return {}
    if prefix == "sync":
        stage = f"stage_{line['stage']}/" if "stage" in line else ""
        prefix = f"sync/{stage}fragment_{line['fragment']}"
    links: Sequence[Mapping[str, float]] = line.get("links") or ()
    of_links = {
        f"links_{key}": of(values)
        for key, of in (("round_trip_seconds", max), ("sent_bytes", sum), ("received_bytes", sum))
        if (values := [link[key] for link in links if key in link])
    }
    return {
        f"{prefix}/{key}": value
        for key, value in [*line.items(), *of_links.items()]
        if isinstance(value, (int, float)) and key not in _OF_ALL
    }


def step_of(line: Mapping[str, Any]) -> int:
    """Return the inner step that a record is of."""
    return int(line.get("step", line.get("applied_step", 0)))


def not_installed(name: str, library: str, extra: str) -> str:
    """Return what is said where the library of a sink is missing."""
    return (
        f'dsx.metrics.to has "{name}" but {library} is not installed: pip install '
        f'"dsx-train[{extra}]"'
    )
