"""A run without a stop, and the same one stopped midway and gone on with by other processes.

What differs between engines is a `Trainer`; how a run is trained, saved and compared is here.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

from .evidence import Run, new_run, not_as_uninterrupted, records_in, state_in
from .models import LAST_STEP, Row
from .ranks import run_ranks

NUM_CLUSTERS, TIMEOUT_SECONDS = 2, 1500.0
WHEN = ("end", "drained", "averaged", "restored")


class Trainer(Protocol):
    """One rank's engine with dsx attached."""

    handle: Any

    def step(self, step: int) -> float:
        """Take a step and return its loss."""
        ...

    def weights(self) -> str:
        """Return a hash of this rank's weights."""
        ...

    def save(self, directory: Path) -> None:
        """Save the engine and its outer state below a directory of all clusters."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


# the row's name, the metrics directory, and what is to be loaded
Build = Callable[[str, str, "Path | None"], Trainer]


def record(workspace: str, rows: Mapping[str, Row], num_ranks: int, build: Build) -> dict[str, Run]:
    """Return a run for every row, with the resumed one beside it."""
    base = Path(workspace)
    for what in (train_all, resume_all):
        run_ranks(what, num_ranks, workspace, dict(rows), build, timeout_seconds=TIMEOUT_SECONDS)
    return {name: put_together(base / name, row.stop, num_ranks) for name, row in rows.items()}


def train_all(workspace: str, rows: Mapping[str, Row], build: Build) -> None:
    for name, row in rows.items():
        train(Path(workspace) / name / "whole", build, name, range(1, LAST_STEP + 1))
        train(Path(workspace) / name / "stopped", build, name, range(1, row.stop + 1))


def resume_all(workspace: str, rows: Mapping[str, Row], build: Build) -> None:
    for name, row in rows.items():
        steps = range(row.stop + 1, LAST_STEP + 1)
        train(Path(workspace) / name / "stopped", build, name, steps)


def train(directory: Path, build: Build, name: str, steps: Iterable[int]) -> None:
    """Train the steps, from a save where they do not begin with 1; save, and finish at the end."""
    warnings.simplefilter("ignore")  # of settings that few rounds do not suit
    steps = list(steps)
    saved = None if steps[0] == 1 else directory / "stop"
    trainer = build(name, str(directory / "records"), saved)
    handle = trainer.handle
    for step in steps:
        handle.log_step(loss=trainer.step(step))
    is_end = steps[-1] == LAST_STEP
    facts: dict[str, Any] = {"step": handle.step, "end": trainer.weights()}
    trainer.save(directory / ("end" if is_end else "stop"))
    if is_end:
        handle.finish()
        facts["drained"] = trainer.weights()
        facts["bytes_sent"] = handle.totals.bytes_sent
        with handle.averaged():
            facts["averaged"] = trainer.weights()
        facts["restored"] = trainer.weights()
        place = f"cluster {handle.cluster_id}, rank {_rank_in_cluster()}"
        (directory / f"{place}.json").write_text(json.dumps(facts))
    trainer.close()


def put_together(directory: Path, stop: int, num_ranks: int) -> Run:
    """Return a row's run, the resumed one beside it, and how they differ."""
    whole, resumed = (read(directory / kind, num_ranks) for kind in ("whole", "stopped"))
    for place, hashes in states(directory / "stopped" / "stop").items():
        resumed["state"][f"stop, {place}"] = hashes
    resumed["values"]["not as uninterrupted"] = not_as_uninterrupted(whole, resumed, stop)
    return {**whole, "resumed": resumed}


def read(directory: Path, num_ranks: int) -> Run:
    run = new_run()
    paths = sorted(directory.glob("cluster *.json"))
    if len(paths) != num_ranks:
        raise RuntimeError(f"{directory} holds the facts of {len(paths)} ranks of {num_ranks}")
    for path in paths:
        facts = json.loads(path.read_text())
        for when in WHEN:
            run["weights"][f"{when}, {path.stem}"] = facts.pop(when)
        run["values"][path.stem] = facts
    ends = states(directory / "end")
    if len(ends) != num_ranks:
        raise RuntimeError(f"{directory} holds the outer state of {list(ends)} only")
    run["state"] = {f"end, {place}": hashes for place, hashes in ends.items()}
    run["records"] = records_in(directory / "records")
    return run


def states(saved: Path) -> dict[str, list[str]]:
    """Return the hashes of every rank's outer state below a directory."""
    found: dict[str, list[str]] = {}
    for path in sorted(saved.rglob("dsx_rank_*.safetensors")):
        (cluster,) = (part for part in path.parts if part.startswith("cluster_"))
        found[f"{cluster}, {path.stem}"] = state_in(path)
    return found


def _rank_in_cluster() -> int:
    import torch.distributed as dist

    return dist.get_rank()
