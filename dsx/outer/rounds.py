"""All ranks of all clusters wait until everybody has sent: in short rounds, however long it takes.

Some send for an hour, others have nothing to send: another cluster's ranks would meet a deadline of
the next exchange, those of the same one that of a collective. So nobody goes on before all can.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import torch

from dsx.core.engine import ClusterRanks
from dsx.core.transport import PeerLost, Transport

_FIRST_SECONDS, _LONGEST_SECONDS = 0.02, 1.0  # of a round; each is twice as long as the one before


def until_all_are_done(
    what: str, own: Future[Any], ranks: ClusterRanks, transport: Transport
) -> Iterator[None]:
    """Wait for `own`, and for everybody else's. Collective over all ranks of all clusters.

    Clusters of one process take turns where it yields. Raises what `own` has, and PeerLost where
    another rank of this cluster has lost a peer.
    """
    seconds = _FIRST_SECONDS
    lost: BaseException | None = None
    for number in itertools.count(1):
        futures.wait([own], seconds)
        seconds = min(2 * seconds, _LONGEST_SECONDS)
        if own.done():
            lost = own.exception() or lost
        flags = torch.tensor([float(not own.done()), float(lost is not None)])
        is_under_way, is_lost = ranks.max_over_stages(flags).tolist()
        if lost is not None:
            raise lost
        if is_lost:
            raise PeerLost(f"{what}: another rank of this cluster lost a peer; it says which")
        asked = transport.gather(f"{what}, round {number}", bool(is_under_way))
        yield
        try:
            if not any(asked()):
                return
        except PeerLost as error:
            lost = error  # in the next round, so that this cluster's ranks end together
