"""What the two processes of a run are told, and what each block of it has cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_CLUSTERS = 2
RUN = "run"  # the folder of the run that tells of itself


@dataclass(frozen=True)
class Block:
    """Steps that were taken with everything on, or off: seconds per step."""

    is_on: bool
    thread_seconds: float  # of a core, of the training thread
    process_seconds: float  # of cores, of all threads
    wall_seconds: float


@dataclass(frozen=True)
class Job:
    """A run of two processes that train two models in turns, of which one run tells of itself.

    `num_pairs` of blocks of `steps` each, one with and one without; the model has `layers` matrices
    of `width` squared, and takes `rows` of that width. `outlets` are those of `metrics.to`.
    """

    directory: str
    rendezvous: str
    stub: str
    pages: tuple[int, ...]
    outlets: tuple[str, ...]
    num_pairs: int
    steps: int
    layers: int
    width: int
    rows: int
    interval: int

    def dsx(self, cluster: int, is_on: bool) -> dict[str, Any]:
        """Return a cluster's configuration, with all that tells of the run, or with nothing."""
        on = {
            "dir": str(Path(self.directory) / RUN),
            "to": list(self.outlets),
            "trace": True,
            "prometheus": f"127.0.0.1:{self.pages[cluster] - cluster}",
            "otlp": self.stub,
            "notices": [{"url": f"{self.stub}/notices"}],
        }
        return {
            "dsx": {
                "preset": "streaming_diloco",
                "schedule": {"interval": self.interval},
                "fragments": {"by": "size", "num_fragments": 4},
                "delay": {"steps": 2, "alpha": 0.5},
                "clusters": {
                    "num_clusters": NUM_CLUSTERS,
                    "cluster_id": cluster,
                    "rendezvous": self.rendezvous,
                },
                "metrics": on if is_on else {"progress_seconds": 0.0},
            }
        }

    @property
    def steps_told(self) -> int:
        """Steps of the run that tells of itself, with those before the first block."""
        return (self.num_pairs + 1) * self.steps

    def write(self) -> None:
        """Write it where processes find it."""
        (Path(self.directory) / "job.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, directory: Path) -> Job:
        """Read what `write` has written."""
        read: dict[str, Any] = json.loads((directory / "job.json").read_text())
        read |= {name: tuple(read[name]) for name in ("pages", "outlets")}
        return cls(**read)


def log_path(directory: Path, cluster: int) -> Path:
    """Return where a cluster writes its blocks, a JSON object per line."""
    return directory / f"cluster_{cluster}.jsonl"
