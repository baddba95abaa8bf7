"""What a cluster's ranks tell its first one, which tells each of them what it has made of that.

The cluster's own store is asked three times by a rank, and four times by the first one, however
many there are: nobody asks for what is others' one by one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dsx.comm.topology import RankInfo
from dsx.core.transport import PeerLost
from dsx.core.waits import waiting_for

_RELAY_SECONDS = 30.0  # for the first rank to say that somebody did not come in time


def through_first(
    store: dist.Store,
    what: str,
    rank_info: RankInfo,
    own: Any,
    make: Callable[[list[Any]], Sequence[Any]],
    deadline_seconds: float,
    make_seconds: float = 0.0,
) -> Any:
    """Tell the first rank a JSON value, and return what it makes for this one.

    `store` is the cluster's, and `what`, a word or two, the key. `make` is called on the first rank
    alone, with the values by rank, and returns as many; it may take `make_seconds`. PeerLost on all
    ranks, with the same words, if one does not come within `deadline_seconds`, or `make` raises it;
    of any other error that `make` raises the others have RuntimeError, which names it.
    """
    ranks = range(rank_info.world_size)
    whole: Any = store  # its class does not declare all that it has
    given = [f"{what}/of/{rank}" for rank in ranks]
    made = [f"{what}/for/{rank}" for rank in ranks]
    store.set(given[rank_info.rank], json.dumps(own))
    if rank_info.rank:
        seconds = deadline_seconds + make_seconds + _RELAY_SECONDS
        told = _get(store, what, [made[rank_info.rank]], lambda: "its rank 0", rank_info, seconds)
        value = json.loads(told[0])
        if "lost" in value:
            raise PeerLost(value["lost"])
        if "error" in value:
            raise RuntimeError(
                f"{what}: rank 0 of cluster {rank_info.cluster_id} has failed: {value['error']}"
            )
        return value["value"]

    def missing() -> str:
        silent = [rank for rank in ranks if not store.check([given[rank]])]
        return f"its rank(s) {', '.join(map(str, silent))}"

    try:
        told = _get(store, what, given, missing, rank_info, deadline_seconds)
        values = make([json.loads(text) for text in told])
        texts = [json.dumps({"value": value}) for _, value in zip(made, values, strict=True)]
    except Exception as error:
        is_lost, name = isinstance(error, PeerLost), type(error).__name__
        said = {"lost": str(error)} if is_lost else {"error": f"{name}: {error}"}
        with suppress(RuntimeError):  # then they learn from their own store
            whole.multi_set(made, [json.dumps(said)] * len(made))
        raise
    whole.multi_set(made, texts)
    return values[0]


def _get(
    store: dist.Store,
    what: str,
    keys: list[str],
    missing: Callable[[], str],
    rank_info: RankInfo,
    seconds: float,
) -> list[bytes]:
    """Wait for keys, and return their values; PeerLost names who is missing."""
    try:
        with waiting_for(f"{what}, of the ranks of this cluster", seconds):
            store.wait(keys, timedelta(seconds=seconds))
            return store.multi_get(keys)
    except RuntimeError as error:
        try:
            who = missing()
        except RuntimeError:  # the store has gone
            who = "its other ranks"
        raise PeerLost(
            f"{what}: cluster {rank_info.cluster_id} waits for {who}, which did not come within "
            f"{seconds:g} s (clusters.join_deadline_seconds): {str(error).splitlines()[0]}"
        ) from error
