"""The torch.distributed world of one cluster: joined within a deadline, by name of who is missing.

torch's own waits are of ten or thirty minutes and name nobody. They hold again once the world
stands, for what the engine does in it.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from dsx.comm.open_files import make_room
from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_MOST_MINUTES = 60 * 24 * 30


def backend_of_world() -> str:
    """Return that of a cluster's own world, as DeepSpeed chooses; between clusters it is gloo."""
    has_cuda = torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu"
    return "nccl" if has_cuda else "gloo"


def collective_limit() -> timedelta:
    """Return how long a collective of the world may take: torch's limit, or DEEPSPEED_TIMEOUT.

    DeepSpeed's counts in minutes, and is of the world that it would have made.
    """
    minutes = os.environ.get("DEEPSPEED_TIMEOUT", "")
    if minutes:
        if not minutes.isdecimal() or not 0 < int(minutes) <= _MOST_MINUTES:
            raise ValueError(
                f"DEEPSPEED_TIMEOUT={minutes!r} in the environment must be an integer, minutes, "
                f"1..{_MOST_MINUTES}; leave it out for torch's own limit"
            )
        return timedelta(minutes=int(minutes))
    usual = c10d.default_pg_nccl_timeout if backend_of_world() == "nccl" else None
    return usual or c10d.default_pg_timeout


def init_cluster_world(
    rank_info: RankInfo, store: dist.Store, deadline_seconds: float, limit: timedelta
) -> None:
    """Make the world; PeerLost names the ranks of the cluster that did not come.

    `limit` is that of its collectives later on.
    """
    backend = backend_of_world()
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    elif rank_info.world_size > 1:
        ranks = rank_info.world_size
        make_room(ranks, f"gloo's world of {ranks} ranks")
    deadline = timedelta(seconds=deadline_seconds)
    here = [f"dsx/here/{rank}" for rank in range(rank_info.world_size)]
    try:
        store.set(here[rank_info.rank], "")
        if store.add("dsx/num_here", 1) >= rank_info.world_size:  # who waits, waits for one key
            store.set("dsx/all_here", "")
        with waiting_for("the other ranks of this cluster to join", deadline_seconds):
            store.wait(["dsx/all_here"], deadline)
            dist.init_process_group(
                backend,
                store=store,
                rank=rank_info.rank,
                world_size=rank_info.world_size,
                timeout=deadline,
            )
    except RuntimeError as error:
        raise PeerLost(_explain(rank_info, store, here, deadline_seconds, error)) from error
    limit_collectives(limit)


def limit_collectives(limit: timedelta) -> None:
    """Let a collective of this cluster's default group take so long at most, from now on."""
    c10d._set_pg_timeout(limit)  # pyright: ignore


def _explain(
    rank_info: RankInfo, store: dist.Store, here: list[str], deadline_seconds: float, error: object
) -> str:
    what = f"cluster {rank_info.cluster_id}, rank {rank_info.rank} of {rank_info.world_size}"
    reason = str(error).splitlines()[0]
    try:
        missing = [str(rank) for rank, key in enumerate(here) if not store.check([key])]
    except RuntimeError:
        return f"{what}: the launcher's store has ended while its ranks joined: {reason}"
    if not missing:
        return f"{what}: the ranks of this cluster cannot connect to each other: {reason}"
    return (
        f"{what}: rank(s) {', '.join(missing)} of this cluster did not join within "
        f"{deadline_seconds:g} s (clusters.join_deadline_seconds): look at what they printed, or "
        "whether they were started"
    )
