"""What `dsx plan` is given: the command line, as typed, each number in its bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dsx.plan.candidates import MOST_CLUSTERS
from dsx.plan.model import MOST_PARAMETERS
from dsx.plan.published.scenario import require_number

BOUNDS = {
    "params": (1, MOST_PARAMETERS),
    "layers": (1, 10_000),
    "hidden": (1, 10**6),
    "gpus_per_cluster": (1, 10**6),
    "step_seconds": (1e-6, 1e9),
    "mfu": (0.001, 1),
    "tokens_per_step": (1, 1e15),
    "gbps": (1e-9, 1e9),
    "latency_ms": (0, 1e9),
    "clusters": (2, MOST_CLUSTERS),
    "target": (0.1, 99.99),
    "memory_limit": (1e-6, 1e9),
    "max_interval": (5, 10**6),
    "egress_price": (0, 1e6),
    "gpu_hour_price": (0, 1e6),
    "steps": (1, 1e12),
    "mtbf": (0.01, 1e6),
    "heal_seconds": (0, 1e9),
    "save_every": (1, 1e12),
    "save_seconds": (0, 1e9),
    "coding_cores": (1, 4096),
    "cores_per_rank": (1, 4096),
}
_GOES_WITH = {
    "mfu": "gpu",
    "tokens_per_step": "gpu",
    "model": "deepspeed",
    "layers": "params",
    "hidden": "params",
    "heal_seconds": "mtbf",
    "save_every": "save_seconds",
    "save_seconds": "save_every",
}


@dataclass(frozen=True)
class Given:
    """The command line, as typed."""

    from_run: Path | None = None
    megatron: Path | None = None
    deepspeed: Path | None = None
    model: Path | None = None
    params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    gpus_per_cluster: int | None = None
    step_seconds: float | None = None
    gpu: str | None = None
    mfu: float | None = None
    tokens_per_step: float | None = None
    gbps: float | None = None
    latency_ms: float | None = None
    link: Path | None = None
    clusters: int | None = None
    target: float = 95.0
    codec: Path | None = None
    memory_limit: float | None = None
    max_interval: int = 1000
    egress_price: float | None = None
    gpu_hour_price: float | None = None
    steps: float | None = None
    mtbf: float | None = None
    heal_seconds: float | None = None
    save_every: float | None = None
    save_seconds: float | None = None
    launch: Path | None = None
    coding_cores: int | None = None
    cores_per_rank: int | None = None


def require_sense(given: Given) -> None:
    """Raise ValueError for a number out of bounds, and for an option that would be ignored."""
    for name, (least, most) in BOUNDS.items():
        value = getattr(given, name)
        if value is not None:
            require_number(_option(name), value, least, most)
    for name, other in _GOES_WITH.items():
        if getattr(given, name) is not None and getattr(given, other) is None:
            raise ValueError(
                f"{_option(name)} goes with {_option(other)}, and would be ignored: leave it out, "
                f"or give {_option(other)}"
            )
    if given.gbps is not None and given.link is not None:
        raise ValueError("--gbps and --link give the line twice; leave one out")
    if given.coding_cores is not None and given.cores_per_rank is not None:
        raise ValueError(
            "--coding-cores says on how many cores a rank codes, which --cores-per-rank has the "
            "plan choose; leave one out"
        )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
