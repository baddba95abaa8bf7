"""Who is where: cluster, rank inside it, and how a launcher's ranks split into clusters.

Two ways to launch lead to the same place. One launcher over everything: its ranks are cut into
`num_clusters` equal contiguous runs. One launcher per cluster: each brings its own world and
says which cluster it is. Either way each cluster becomes one torch.distributed world of its own,
so nothing the inner engine does can reach another cluster.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankInfo:
    """One process: its cluster, and its rank among the `world_size` ranks of that cluster."""

    cluster_id: int
    num_clusters: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class LauncherEnvironment:
    """What `deepspeed` and `torchrun` tell a rank through its environment."""

    rank: int
    world_size: int
    master_addr: str
    master_port: int
    store_is_hosted: bool
    restarts: str = "0"  # of all ranks, by torchrun; its store outlives them

    @classmethod
    def read(cls, environ: Mapping[str, str] = os.environ) -> LauncherEnvironment:
        """Read the launcher's variables; RuntimeError names those that are missing."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in environ]
        if missing:
            raise RuntimeError(
                f"no rendezvous: {', '.join(missing)} not set in the environment; start the script "
                "with `deepspeed --num_gpus N script.py ...` or `torchrun --nproc-per-node N "
                "script.py ...`"
            )
        world_size = _number(environ, "WORLD_SIZE", 1)
        if "LOCAL_RANK" in environ:
            on_this_host = _number(environ, "LOCAL_WORLD_SIZE", 1, world_size, str(world_size))
            _number(environ, "LOCAL_RANK", 0, on_this_host - 1)
        return cls(
            rank=_number(environ, "RANK", 0, world_size - 1),
            world_size=world_size,
            master_addr=environ["MASTER_ADDR"],
            master_port=_number(environ, "MASTER_PORT", 0, 65535),
            # torchrun's agent already listens on the master port; deepspeed's launcher does not
            store_is_hosted=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restarts=environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
        )


def _number(
    environ: Mapping[str, str],
    name: str,
    least: int,
    most: int | None = None,
    default: str | None = None,
) -> int:
    """Return an integer of the environment; RuntimeError says what is allowed."""
    text = environ.get(name, default) or ""
    number = int(text) if text.lstrip("-").isdecimal() else None
    if number is None or number < least or (most is not None and number > most):
        size = environ["WORLD_SIZE"]
        of_world = f" with WORLD_SIZE={size}" if name in ("RANK", "LOCAL_WORLD_SIZE") else ""
        allowed = f"at least {least}" if most is None else f"{least}..{most}"
        raise RuntimeError(
            f"{name}={text!r} in the environment{of_world} must be an integer, {allowed}: it is "
            "set by the launcher; start all ranks with one launcher, or set both by the same count"
        )
    return number


def split_world(rank: int, world_size: int, num_clusters: int) -> RankInfo:
    """Cut one launcher's ranks into equal contiguous clusters."""
    if world_size % num_clusters:
        fitting = max(1, world_size // num_clusters) * num_clusters
        raise ValueError(
            f"clusters.num_clusters={num_clusters} does not divide the launcher's {world_size} "
            f"ranks; start a multiple of it, for example {fitting}, or one launcher per cluster "
            "with clusters.rendezvous tcp://host:port"
        )
    size = world_size // num_clusters
    return RankInfo(rank // size, num_clusters, rank % size, size)
