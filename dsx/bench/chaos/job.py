"""What the ranks of a run are told, and the folder in which they and the driver meet."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dsx.bench.chaos.plan import Plan

Preset = Literal["streaming", "delayed", "recommended", "diloco"]
EngineName = Literal["torch", "deepspeed", "megatron"]
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "streaming": {
        "preset": "streaming_diloco",
        "schedule": {"interval": 8},
        "delay": {"steps": 3},
        "fragments": {"by": "size", "num_fragments": 4},
    },
    "delayed": {"preset": "diloco_delayed", "schedule": {"interval": 6}},
    "recommended": {"preset": "recommended", "schedule": {"interval": 8}, "delay": {"steps": 3}},
    "diloco": {"preset": "diloco", "schedule": {"interval": 6}},
}
INT4 = {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}
OWN_CODES = {"recommended"}  # which have a codec of their own
PLANS: Mapping[str, Plan] = {
    "streaming": Plan(8, in_turns=True), "delayed": Plan(6, in_turns=False),
    "recommended": Plan(8, in_turns=True), "diloco": Plan(6, in_turns=False),
}  # fmt: skip
_SHARDS = 4096  # short ones: who is given one reads it before the run ends
_LEAVE_SECONDS = 0.5  # that a cluster trains on after SIGTERM, for others may be told as well


@dataclass(frozen=True)
class Job:
    """One run: `members` as "link.members" has them, `ports` and `keys` by cluster.

    Nobody goes on behind `last_step`, which an order may make earlier. A step takes `step_seconds`
    at least. `engine` is a module of engines/.
    """

    directory: str
    preset: str
    num_clusters: int
    num_ranks: int
    members: Sequence[str]
    ports: Sequence[int]
    keys: Sequence[str]
    last_step: int
    step_seconds: float
    suspect_seconds: float
    seed: int
    engine: EngineName = "torch"
    zero_stage: int = 1  # of DeepSpeed
    has_disks: bool = False  # of its own for each cluster's checkpoints, small ones

    def dsx(self, cluster: int) -> dict[str, Any]:
        """Return a cluster's configuration."""
        method = dict(PRESETS[self.preset])
        if self.preset not in OWN_CODES:
            method["compression"] = INT4
        link = {
            "security": "curve", "members": list(self.members), "keys": self.keys[cluster],
            "port": self.ports[cluster], "suspect_seconds": self.suspect_seconds,
        }  # fmt: skip
        clusters = {"num_clusters": self.num_clusters, "deadline_seconds": 120.0,
                    "join_deadline_seconds": 120.0, "leave_after_seconds": _LEAVE_SECONDS,
                    "data_shards": _SHARDS, "cluster_id": cluster}  # fmt: skip
        return {"dsx": {**method, "clusters": clusters, "link": link}}

    def write(self) -> None:
        """Write it where ranks find it."""
        (Path(self.directory) / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read what `write` has written."""
        return cls(**json.loads((directory / "job.json").read_text()))


def log_path(directory: Path, cluster: int, rank: int) -> Path:
    """Return where a rank writes what it does, a JSON object per line."""
    return directory / f"rank_{cluster}_{rank}.jsonl"


def output_path(directory: Path, cluster: int, rank: int) -> Path:
    """Return where a rank's own output goes."""
    return directory / f"rank_{cluster}_{rank}.log"


def checkpoints_path(directory: Path, cluster: int) -> Path:
    """Return where a cluster's checkpoints are."""
    return directory / "checkpoints" / f"cluster_{cluster}"


def orders_path(directory: Path, cluster: int) -> Path:
    """Return where the driver tells a cluster what to do: `last_step`, and faults by step."""
    return directory / f"orders_{cluster}.json"


def give_orders(directory: Path, cluster: int, **orders: Any) -> None:
    """Add to a cluster's orders; a file is there whole or not at all."""
    path = orders_path(directory, cluster)
    given = json.loads(path.read_text()) if path.exists() else {}
    path.with_suffix(".new").write_text(json.dumps({**given, **orders}))
    path.with_suffix(".new").rename(path)
