"""How clusters meet at a shared key-value store: who is alive now, and of one kind.

The store is torch's TCPStore. It is hosted by cluster 0's first rank, or by a small process of
its own (`dsx rendezvous`), so that no cluster owns it. A store may outlive many runs: the
handshake therefore gives every run a fresh key space ("session") that contains a nonce of every
cluster alive now, and a stale key of an earlier run can never be mistaken for a peer.

Every wait has a deadline and says which clusters were missing.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from dsx.comm.claims import claim, holder, is_alive, refusal_of
from dsx.comm.store import another_connection, open_store
from dsx.comm.topology import RankInfo
from dsx.comm.versions import about_me, refusal, tell_differences
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_JOIN = "dsx/join"
_LOOK_SECONDS = 2.0
_POLL_SECONDS = 0.05
_EACH_SECONDS = 0.25  # between two looks at each cluster, while not all are there
_LINGER_SECONDS = 1.0
logger = logging.getLogger(__name__)


class RunGoesOn(Exception):
    """Clusters need not meet: a run of theirs goes on, which this one joins; `found` says which."""

    def __init__(self, found: Any) -> None:
        super().__init__("a run goes on")
        self.found = found


def hello_of(rank_info: RankInfo, may_differ: Sequence[str]) -> dict[str, Any]:
    """Return what a cluster says of itself, to be compared before anything else."""
    sizes = {"num_clusters": rank_info.num_clusters, "world_size": rank_info.world_size}
    return {**about_me(may_differ), **sizes}


def require_same_kind(
    rank_info: RankInfo, own: dict[str, Any], peer: int, theirs: dict[str, Any]
) -> None:
    """Raise ValueError if a cluster that trains already cannot train with this one."""
    difference = _difference(rank_info, peer, own, theirs)
    if difference:
        raise ValueError(difference)


def meet(
    store: dist.Store,
    rank_info: RankInfo,
    deadline_seconds: float,
    may_differ: Sequence[str] = (),
    look: Callable[[], Any] = lambda: None,
) -> str:
    """Wait until every cluster is alive here, and return a session name all of them share.

    Called by rank 0 of each cluster. A cluster posts a fresh nonce and answers the nonces it sees
    from the others; only a live cluster answers a fresh one. PeerLost names who never came;
    ValueError says if clusters disagree about their number or size, run versions that cannot meet
    (versions.py), or if another process that is alive is this cluster (claims.py). `may_differ` is
    that of the configuration. RunGoesOn as soon as `look` has found one that does.
    """
    nonce = uuid.uuid4().hex
    hello = {"nonce": nonce, **hello_of(rank_info, may_differ)}
    beats = dist.PrefixStore(_JOIN, another_connection(store))
    store = dist.PrefixStore(_JOIN, store)
    require_held = claim(store, beats, rank_info.cluster_id, nonce)
    store.set(f"here/{rank_info.cluster_id}", json.dumps(hello))
    peers = [m for m in range(rank_info.num_clusters) if m != rank_info.cluster_id]
    answered: dict[int, str] = {}
    met = {rank_info.cluster_id: hello}
    until = time.monotonic() + deadline_seconds
    look_at = time.monotonic() + _EACH_SECONDS
    missing = peers
    with waiting_for(lambda: f"{_name(missing)} to join", deadline_seconds):
        while len(met) < rank_info.num_clusters:
            is_late = time.monotonic() > until
            looks_at_each = is_late or time.monotonic() > look_at
            if looks_at_each:
                look_at = time.monotonic() + _EACH_SECONDS
            unmet = missing if answered else []  # nobody can have answered before
            answers = _of(store, f"answer/{nonce}", unmet, looks_at_each)
            here = _of(store, "here", peers, looks_at_each)
            _answer(store, rank_info, hello, here, answered)  # who has answered can be answered
            for peer in peers:
                if peer in met and met[peer]["nonce"] != answered.get(peer):
                    del met[peer]  # it has been started again, and is yet to answer
                elif peer in answers and answers[peer]["nonce"] == answered.get(peer):
                    met[peer] = answers[peer]
                    _require_alike(rank_info, peer, hello, answers[peer])
            missing = [m for m in peers if m not in met]
            if missing and (found := look()) is not None:
                raise RunGoesOn(found)
            require_held()
            if looks_at_each:
                _require_same_number(store, rank_info, missing)
            if missing and is_late:
                raise PeerLost(
                    f"{_name(missing)} of {rank_info.num_clusters} did not come within "
                    f"{deadline_seconds:g} s (clusters.join_deadline_seconds): start the launcher "
                    "of each missing cluster with the same rendezvous address"
                )
            time.sleep(_POLL_SECONDS)
    tell_differences(met)
    return "-".join(str(met[m]["nonce"])[:8] for m in range(rank_info.num_clusters))


def refuse_second_host(host: str, port: int) -> None:
    """Raise ValueError if the store at an address is that of another cluster 0, which is alive."""
    try:
        store = open_store(host, port, is_host=False, deadline_seconds=_LOOK_SECONDS)
        joined = dist.PrefixStore(_JOIN, store)
        claimed = holder(joined, 0)
        is_taken = claimed is not None and is_alive(joined, claimed)
    except (PeerLost, RuntimeError):  # nobody answers: what holds the port is no store, or dead
        return
    if is_taken and claimed is not None:
        raise refusal_of(0, claimed)


def _of(
    store: dist.Store, prefix: str, peers: Sequence[int], looks_at_each: bool
) -> dict[int, dict[str, Any]]:
    """Return what is there of peers: two requests, once it is there of all.

    Before that nothing, by one request, or what is there, by one for each of them.
    """
    keys = {peer: f"{prefix}/{peer}" for peer in peers}
    if keys and not store.check([*keys.values()]):
        if not looks_at_each:
            return {}
        keys = {peer: key for peer, key in keys.items() if store.check([key])}
    if not keys:
        return {}
    values = store.multi_get([*keys.values()])
    return dict(zip(keys, map(json.loads, values), strict=True))


def _answer(
    store: Any,
    rank_info: RankInfo,
    hello: dict[str, Any],
    here: Mapping[int, Mapping[str, Any]],
    answered: dict[int, str],
) -> None:
    """Reply to the newest nonces of who is `here`, once to each."""
    new = {p: one["nonce"] for p, one in here.items() if answered.get(p) != one["nonce"]}
    if new:
        keys = [f"answer/{nonce}/{rank_info.cluster_id}" for nonce in new.values()]
        store.multi_set(keys, [json.dumps(hello)] * len(keys))
        answered |= new


def _require_same_number(store: dist.Store, rank_info: RankInfo, missing: Sequence[int]) -> None:
    """Refuse where one that is alive counts other clusters, and so may never answer this one."""
    for peer in missing:
        claimed = holder(store, peer)
        if claimed is None or not store.check([f"here/{peer}"]):
            continue
        theirs = json.loads(store.get(f"here/{peer}"))
        if theirs["nonce"] != claimed["nonce"] or theirs["num_clusters"] == rank_info.num_clusters:
            continue
        if rank_info.cluster_id >= theirs["num_clusters"] and is_alive(store, claimed):
            raise ValueError(
                f"this is cluster {rank_info.cluster_id} of {rank_info.num_clusters}, but cluster "
                f"{peer} is one of {theirs['num_clusters']}, 0..{theirs['num_clusters'] - 1} "
                "(clusters.num_clusters): give all clusters the same number"
            )


def _require_alike(
    rank_info: RankInfo, peer: int, own: dict[str, Any], theirs: dict[str, Any]
) -> None:
    """Refuse what cannot train together; linger so that the peer reads why, too."""
    difference = _difference(rank_info, peer, own, theirs)
    if difference:
        time.sleep(_LINGER_SECONDS)
        raise ValueError(difference)


def _difference(
    rank_info: RankInfo, peer: int, own: dict[str, Any], theirs: dict[str, Any]
) -> str | None:
    """Return what differs: in which dsx they run, first, for only equal ones know what follows."""
    refused = refusal(rank_info.cluster_id, own, peer, theirs)
    if refused:
        return refused
    for key, what in (("num_clusters", "clusters.num_clusters"), ("world_size", "ranks")):
        if own[key] != theirs[key]:
            return (
                f"cluster {rank_info.cluster_id} has {what} {own[key]}, cluster {peer} has "
                f"{theirs[key]}: shards line up only if all clusters have the same; start them "
                "with the same configuration and the same number of ranks"
            )
    return None


def _name(clusters: Sequence[int]) -> str:
    numbers = ", ".join(map(str, clusters))
    return f"cluster {numbers}" if len(clusters) == 1 else f"clusters {numbers}"
