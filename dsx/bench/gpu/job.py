"""What a rank of a check is told, and what it tells when it has trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NUM_CLUSTERS = 2
STREAM = {
    "schedule": {"interval": 8},
    "delay": {"steps": 3},
    "fragments": {"num_fragments": 4},
}
# each preset in a form of some rounds within STEPS; what is not here is the preset's own
SHORT: Mapping[str, Mapping[str, Any]] = {
    "local_sgd": {"schedule": {"interval": 6}},
    "slowmo": {"schedule": {"interval": 6}},
    "diloco": {"schedule": {"interval": 6}},
    "opendiloco": {"schedule": {"interval": 6}},
    "streaming_diloco": STREAM,
    "cocodc": STREAM,
    "diloco_delayed": {"schedule": {"interval": 6}},
    "eager": {"schedule": {"interval": 6}},
    "eager_2": {"schedule": {"interval": 6}},
    "eager_fp4": {"schedule": {"interval": 6}},
    "dilocox": {
        "schedule": {"interval": 6},
        "fragments": {"num_fragments": 2},
        "compression": {"dense_rounds": 2},
        "control": {"rank": 8, "max_rank": 16, "min_interval": 2},
    },
    "co2": {"schedule": {"interval": 6}},
    "dreamddp": {"schedule": {"interval": 3}},
    "plsgd_enp": {"schedule": {"interval": 3}},
    "overlap_local_sgd": {"schedule": {"interval": 6}},
    "cocktail_sgd": {},
    "recommended": {"schedule": {"interval": 8}, "delay": {"steps": 3}},
}
STEPS = 48
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """One rank's part: which engine trains by which preset, and where it meets the others.

    Whose it is, where and in which folder, says who starts it (runs.py).
    """

    engine: str
    preset: str
    device: str = "cuda"
    state: str = "masters"  # state.device
    num_clusters: int = NUM_CLUSTERS
    steps: int = STEPS
    saves_at: int = 0  # the step behind which it saves, and ends
    loads: str = ""  # the folder of a job that has saved
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    cluster: int = 0
    meeting: str = ""
    folder: str = ""

    def dsx(self) -> dict[str, Any]:
        """Return the configuration."""
        clusters = {
            "num_clusters": self.num_clusters, "rendezvous": self.meeting,
            "cluster_id": self.cluster, "deadline_seconds": DEADLINE_SECONDS,
            "join_deadline_seconds": DEADLINE_SECONDS,
        }  # fmt: skip
        state: dict[str, Any] = {"device": self.state}
        if self.state == "disk":
            state["dir"] = self.folder
        method = {**SHORT[self.preset], **self.overrides}
        metrics = {"dir": str(Path(self.folder) / "run")}  # as a run has them: records of syncs
        axes = {"clusters": clusters, "state": state, "metrics": metrics}
        return {"dsx": {"preset": self.preset, **method, **axes}}

    def result_path(self, rank: int) -> Path:
        """Return where a rank says what it has seen."""
        return Path(self.folder) / f"result_{self.cluster}_{rank}.json"

    def saved_path(self) -> Path:
        """Return where a cluster saves."""
        return Path(self.folder) / f"saved_{self.cluster}"

    def path(self) -> Path:
        """Return where the job itself is, for all ranks of the cluster."""
        return Path(self.folder) / f"job_{self.cluster}.json"

    def write(self) -> None:
        """Write it."""
        self.path().write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Job:
        """Read what `write` has written."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True)
class Seen:
    """What one rank has seen.

    `syncs` are places of dsx's code that made the host wait for the device in a step, by how often.
    `average` is a hash of the average model. Bytes are of outer training, wherever they lie: asked
    for, and planned by what `dsx memory` computes with.
    """

    losses: list[float]
    average: str
    backend: str
    syncs: dict[str, int]
    given_bytes: int
    planned_bytes: int
    step_seconds: float
    blocked_seconds: float
    wait_seconds: float
    num_rounds: int
