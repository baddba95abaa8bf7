"""What a run of torchft is told, which faults it can be given, and why not the others."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dsx.bench.chaos.bench import Options
from dsx.bench.chaos.faults import Kind
from dsx.bench.chaos.job import Job
from dsx.config.schema import load_config
from dsx.core.checks import require_choice

OtherName = Literal["torchft"]
KINDS: tuple[Kind, ...] = ("kill_rank", "kill_cluster", "kill_leader", "pause", "leave", "join")
_LINE = "torchft's gloo chooses its ports itself, so its connections cannot be led over a line"
_SPOILT = "torchft's DiLoCo averages whatever it is given, so it would be no comparison"
LEFT_OUT: Mapping[Kind, str] = {
    "reset": _LINE, "cut": _LINE, "cut_one_way": _LINE, "garble": _LINE,
    "not_finite": _SPOILT, "too_large": _SPOILT,
    "clock": "torchft measures nothing by the time of day",
    "full_disk": "a torchft group saves nothing here",
}  # fmt: skip
LIGHTHOUSE = -1  # in the place of a cluster
FEWEST = 2  # groups that make a quorum: as many as these faults always leave


@dataclass(frozen=True)
class GroupJob:
    """One run of torchft; times in seconds. A group is a replica group of one process: a cluster.

    `interval` is H, of which each of `fragments` has its part; `delay` in steps, and `alpha` the
    local part of what a fragment goes on from. The timeouts of collectives, of the manager and of
    the checkpoint transport are those of torchft's own example of DiLoCo, train_diloco.py.
    """

    directory: str
    num_clusters: int
    seed: int
    step_seconds: float
    interval: int
    fragments: int
    delay: int
    alpha: float
    outer_lr: float
    outer_momentum: float
    heartbeat_timeout_seconds: float
    lighthouse_port: int = 0
    heartbeat_interval_seconds: float = 0.1
    collective_timeout_seconds: float = 10.0
    manager_timeout_seconds: float = 30.0
    transport_timeout_seconds: float = 10.0
    quorum_timeout_seconds: float = 60.0
    quorum_retries: int = 59  # one a second
    join_timeout_seconds: float = 60.0

    @property
    def every(self) -> int:
        """Steps from one round, of a fragment, to the next."""
        return self.interval // self.fragments

    def write(self) -> None:
        """Write it where the processes find it."""
        (Path(self.directory) / "torchft.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> GroupJob:
        """Read what `write` has written."""
        return cls(**json.loads((directory / "torchft.json").read_text()))


def job_of(options: Options) -> GroupJob:
    """Return the run of torchft that is as near to dsx's as torchft can be; no port yet."""
    members = [f"a{cluster}=h:1" for cluster in range(options.num_clusters)]
    nowhere = ["0"] * options.num_clusters
    like = Job(
        "", options.preset, options.num_clusters, 1, members, [1] * options.num_clusters, nowhere,
        1, 1.0, options.suspect_seconds, options.seed,
    )  # fmt: skip
    method: Any = load_config(like.dsx(0)).method  # of these presets: both have what is read here
    outer = method.outer_optimizer
    settings = GroupJob(
        str(options.directory / "torchft"), options.num_clusters, options.seed,
        options.step_seconds, method.schedule.interval, 1, 0, 0.0,
        outer.lr, outer.momentum, options.suspect_seconds,
    )  # fmt: skip
    if options.preset == "diloco":
        return settings
    delay, fragments = method.delay, method.fragments.num_fragments
    most = settings.interval // fragments - 1
    return replace(settings, fragments=fragments, delay=min(delay.steps, most), alpha=delay.alpha)


def require_comparable(against: str, options: Options) -> None:
    """Raise ValueError for what cannot be compared, by its name."""
    require_choice("--against", against, OtherName)
    if importlib.util.find_spec("torchft") is None:
        raise ValueError(
            "--against torchft needs torchft, which is not installed: pip install torchft"
        )
    if options.engine != "torch":
        raise ValueError(
            f"--engine {options.engine} is not served with --against torchft: it trains with plain "
            "PyTorch; take --engine torch"
        )
    if options.preset not in ("streaming", "diloco"):
        raise ValueError(
            f"--preset {options.preset} is not served with --against torchft, which has nothing "
            "like it; take streaming or diloco"
        )
    require_kinds(options.kinds)


def require_kinds(kinds: Sequence[Kind]) -> None:
    """Raise ValueError for faults that torchft cannot be given."""
    for kind in kinds:
        if kind in LEFT_OUT:
            raise ValueError(
                f"--kinds {kind} cannot be compared with torchft: {LEFT_OUT[kind]}; take some of "
                f"{', '.join(KINDS)}"
            )


def version() -> str:
    """Return which torchft is installed."""
    return importlib.metadata.version("torchft")


def final_path(directory: Path, cluster: int) -> Path:
    """Return where a group leaves its model at the end."""
    return directory / f"final_{cluster}.pt"


def place_path(directory: Path, cluster: int) -> Path:
    """Return where a group keeps its place in its data, for when it is started again."""
    return directory / f"place_{cluster}.json"
