"""What the processes of a run are told, and the folder in which they and the driver meet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One run of a process per cluster; a step computes for `step_seconds`, mostly asleep.

    `clusters` and `link` are the parts of a JSON by which they meet, the same for all.

    The model has `num_layers` matrices of `width` squared, a fragment each.
    """

    directory: str
    clusters: Mapping[str, Any]
    link: Mapping[str, Any]
    num_layers: int
    width: int
    interval: int
    step_seconds: float
    heal_rate_mbit: float | None
    suspect_seconds: float

    def dsx(self, cluster: int) -> dict[str, Any]:
        """Return a cluster's configuration."""
        link = {**self.link, "suspect_seconds": self.suspect_seconds}
        if self.heal_rate_mbit is not None:
            link["heal_rate_mbit"] = self.heal_rate_mbit
        return {
            "dsx": {
                "preset": "recommended",
                "schedule": {"interval": self.interval},
                "fragments": {"by": "size", "num_fragments": self.num_layers},
                "clusters": {
                    **self.clusters, "cluster_id": cluster, "join_deadline_seconds": 300.0
                },
                "link": link,
            }
        }  # fmt: skip

    def write(self) -> None:
        """Write it where processes find it."""
        (Path(self.directory) / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read what `write` has written."""
        return cls(**json.loads((directory / "job.json").read_text()))


def log_path(directory: Path, cluster: int) -> Path:
    """Return where a cluster writes what it does, a JSON object per line."""
    return directory / f"cluster_{cluster}.jsonl"


def orders_path(directory: Path) -> Path:
    """Return where the driver says at which steps all save and end."""
    return directory / "orders.json"


def checkpoint_path(directory: Path, cluster: int) -> Path:
    """Return the checkpoint that all have saved at one step."""
    return directory / f"cluster_{cluster}" / "saved"
