"""The model a finished run hands out: the drained anchor, or the mean of the clusters.

Three verbs, so that clusters which share one process can all start averaging before any waits.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.core.exchange import Peers
from dsx.core.transport import EXPORT, Pending, Submission
from dsx.outer.loop import OuterLoop
from dsx.outer.transfer import Arrived


@contextmanager
def exported(loop: OuterLoop) -> Generator[None, None, None]:
    """Hold the exported model in the masters, published; the cluster's own return on exit.

    Collective over all ranks of all clusters; allocates two copies of this rank's masters at most.
    """
    kept = finish_export(loop, begin_export(loop))
    try:
        yield
    finally:
        end_export(loop, kept)


@torch.no_grad()
def begin_export(loop: OuterLoop) -> list[Pending]:
    """Start averaging what is to be exported, where it is a mean; in fp32 whatever the method."""
    if loop.method.delay.export == "anchor":
        return []
    pending: list[Pending] = []
    for fragment in loop.backend.fragments:
        if fragment.numel:
            wire = _read_copy(loop, fragment.id).to("cpu")
            what = Submission(fragment.id, loop.history.step, EXPORT)
            average = ExactMean(Peers(loop.transport.cluster_id, loop.transport.num_clusters))
            pending.append(loop.transport.submit(what, average.exchange(wire)))
        else:
            pending.append(Arrived(torch.empty(0)))
    return pending


@torch.no_grad()
def finish_export(loop: OuterLoop, pending: list[Pending]) -> list[Tensor]:
    """Write the exported model and publish it; return what it replaces."""
    fragments = loop.backend.fragments
    kept = [_read_copy(loop, f.id) for f in fragments]
    sources = [p.wait() for p in pending] if pending else loop.state.anchor
    for fragment, source in zip(fragments, sources, strict=True):
        loop.backend.write(fragment.id, source.to(loop.backend.device))
    loop.totals.bytes_sent += sum(p.bytes_sent for p in pending)
    loop.backend.publish()
    return kept


@torch.no_grad()
def end_export(loop: OuterLoop, kept: list[Tensor]) -> None:
    """Put the cluster's own parameters back."""
    for fragment, local in zip(loop.backend.fragments, kept, strict=True):
        loop.backend.write(fragment.id, local)
    loop.backend.publish()


def _read_copy(loop: OuterLoop, fragment: int) -> Tensor:
    numel = loop.backend.fragments[fragment].numel
    local = torch.empty(numel, device=loop.backend.device)
    loop.backend.read(fragment, local)
    return local
