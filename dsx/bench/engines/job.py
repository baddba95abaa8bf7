"""What a rank of a run is told, and what it tells when it has trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dsx.bench.engines.combinations import COMBINATIONS, Combination
from dsx.examples.gpt import GPTConfig

Way = Literal["plain", "one", "recommended", "diloco"]
CLUSTERS: Mapping[Way, int] = {"plain": 1, "one": 1, "recommended": 2, "diloco": 2}
SHAPE = GPTConfig(num_layers=4, hidden_size=64, num_heads=4, sequence_length=32)
MICRO, ROWS = 4, 8  # windows of a micro-batch, and of a cluster's step
EVALUATED = 64  # windows of the validation data
RATE, SEED = 2e-3, 1234
_ROUNDS, _SHORTEST = 20, 8  # rounds of a run, and the fewest steps of one


@dataclass(frozen=True)
class Job:
    """A run: a combination in one of the ways. `data` is a dataset of `dsx data build`."""

    name: str
    way: Way
    steps: int
    data: str
    meeting: str  # where clusters meet
    deadline_seconds: float

    @property
    def combination(self) -> Combination:
        """What trains."""
        return COMBINATIONS[self.name]

    @property
    def num_clusters(self) -> int:
        """1 or 2."""
        return CLUSTERS[self.way]

    def dsx(self, cluster: int) -> dict[str, Any] | None:
        """Return a cluster's configuration; None for the engine alone."""
        if self.way == "plain":
            return None
        clusters = {
            "num_clusters": self.num_clusters, "cluster_id": cluster, "rendezvous": self.meeting,
            "deadline_seconds": self.deadline_seconds,
            "join_deadline_seconds": self.deadline_seconds,
        }  # fmt: skip
        return {"dsx": {**self._method(), "clusters": clusters}}

    def _method(self) -> dict[str, Any]:
        schedule = {"interval": max(_SHORTEST, self.steps // _ROUNDS)}
        if self.way == "one":
            average, none = {"type": "average"}, {"type": "none"}
            return {
                "preset": "local_sgd", "schedule": schedule, "delay": average,
                "outer_optimizer": none,
            }  # fmt: skip
        if self.way == "diloco":  # rate and momentum of short runs
            outer = {"lr": 0.7, "momentum": 0.5}
            return {"preset": "diloco", "schedule": schedule, "outer_optimizer": outer}
        return {"preset": "recommended", "schedule": schedule, "delay": {"steps": 3}}

    def write(self, directory: Path) -> None:
        """Write it where ranks find it."""
        (directory / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read what `write` has written."""
        return cls(**json.loads((directory / "job.json").read_text()))


@dataclass(frozen=True)
class Seen:
    """What one rank has seen.

    `losses` are its own of each step, empty on a pipeline stage that has none. `validation` is the
    mean loss of a held-out token, nats, of the average where there are two clusters; None as above.
    `weights` is a hash of what it holds of the model, `average` of the average.
    """

    losses: list[float]
    validation: float | None
    weights: str
    average: str


def seen_path(directory: Path, cluster: int, rank: int) -> Path:
    """Return where a rank says what it has seen."""
    return directory / f"seen_{cluster}_{rank}.json"
