"""The end of a run: did all apply the same means last, and which model does it hand out?

The last means and the anchors are compared once more, as no later header would tell. The model is
the drained anchor, or the mean of the clusters. Each is begun and ended by verbs of its own, so
that clusters which share one process can all send before any waits.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.core.transport import COMPARISON, EXPORT, Pending, Submission
from dsx.outer.loop import OuterLoop
from dsx.outer.parity_check import ParityResult
from dsx.outer.recovery import NonFiniteError
from dsx.outer.transfer import Arrived


def begin_comparison(loop: OuterLoop) -> list[tuple[ParityResult, Pending]]:
    """Start exchanging headers once more, for every fragment."""
    started: list[tuple[ParityResult, Pending]] = []
    for fragment, channel in zip(loop.adapter.fragments, loop.state.channels, strict=True):
        parity = ParityResult(anchor=int(loop.recovery.hash_anchor(fragment.id)))
        pending: Pending = Arrived(torch.empty(0))
        if loop.state.is_sent(fragment.id):
            what = Submission(fragment.id, loop.history.step, COMPARISON)
            pending = loop.transport.submit(what, channel.confirm(parity))
        started.append((parity, pending))
    return started


@torch.no_grad()
def end_comparison(loop: OuterLoop, started: list[tuple[ParityResult, Pending]]) -> None:
    """Act on what the headers told; where this cluster was wrong, its masters take the new anchor.

    Collective over the cluster's ranks. Then `sync_model_weights` is due.
    """
    for fragment, (parity, pending) in enumerate(started):
        pending.wait()
        loop.totals.bytes_sent += pending.bytes_sent
        loop.recovery.act_on(fragment, loop.history.launched[fragment], parity, loop.history, True)
        has_anchor = loop.method.outer_optimizer.keeps_anchor
        if has_anchor and loop.transport.seat.cluster_id in parity.differing:
            loop.adapter.write(fragment, loop.state.anchor[fragment])


def require_same_steps(members: Sequence[int], steps: Sequence[int]) -> None:
    """Raise ValueError unless all clusters, by id, have taken the same number of steps."""
    if len(set(steps)) > 1:
        pairs = zip(members, steps, strict=True)
        taken = ", ".join(f"cluster {m}: {n}" for m, n in pairs)
        raise ValueError(
            f"the clusters took different numbers of inner steps ({taken}); give every cluster the "
            "same number of batches"
        )


@contextmanager
def exported(loop: OuterLoop) -> Generator[list[Tensor], None, None]:
    """Hold the exported model in masters and weights; yield the cluster's own.

    They return on exit. Collective over all ranks of all clusters; allocates two copies of this
    rank's masters at most. A boundary that a checkpoint has left is ended first: all have the same.
    """
    loop.end_boundary()
    kept = finish_export(loop, begin_export(loop))
    try:
        yield kept
    finally:
        end_export(loop, kept)


def keep_exported(loop: OuterLoop) -> None:
    """Hold the exported model for good: the cluster's own is gone, and no step follows.

    Collective over all ranks of all clusters.
    """
    loop.end_boundary()
    finish_export(loop, begin_export(loop))


@torch.no_grad()
def begin_export(loop: OuterLoop) -> list[Pending]:
    """Start averaging what is to be exported, where it is a mean; in fp32 whatever the method."""
    if loop.method.delay.export == "anchor":
        return []
    pending: list[Pending] = []
    for fragment in loop.adapter.fragments:
        if fragment.numel:
            wire = _read_copy(loop, fragment.id).to("cpu")
            what = Submission(fragment.id, loop.history.step, EXPORT)
            average = ExactMean(loop.transport.seat).exchange(wire)
            pending.append(loop.transport.submit(what, average))
        else:
            pending.append(Arrived(torch.empty(0)))
    return pending


@torch.no_grad()
def finish_export(loop: OuterLoop, pending: list[Pending]) -> list[Tensor]:
    """Write the exported model, to the weights, too; return the masters that it replaces."""
    fragments = loop.adapter.fragments
    kept = [_read_copy(loop, f.id) for f in fragments]
    sources = [p.wait() for p in pending] if pending else loop.state.anchor
    if pending:
        _require_finite(loop, sources, kept)
    for fragment, source in zip(fragments, sources, strict=True):
        loop.adapter.write(fragment.id, source.to(loop.adapter.device))
    loop.totals.bytes_sent += sum(p.bytes_sent for p in pending)
    loop.adapter.sync_model_weights()
    return kept


@torch.no_grad()
def end_export(loop: OuterLoop, kept: list[Tensor]) -> None:
    """Put the cluster's own parameters back."""
    for fragment, local in zip(loop.adapter.fragments, kept, strict=True):
        loop.adapter.write(fragment.id, local)
    loop.adapter.sync_model_weights()


def require_own(kept: object, what: str) -> None:
    """Raise RuntimeError inside `averaged()`, whose exit would undo what is done there."""
    if kept is not None:
        raise RuntimeError(
            f"{what} inside averaged(): the cluster's own weights, which return on its exit, would "
            "not have it; leave the `with` block first"
        )


def _require_finite(loop: OuterLoop, means: Sequence[Tensor], own: Sequence[Tensor]) -> None:
    """Raise NonFiniteError on every rank of a cluster if a mean is not finite on any of them."""
    norms = [[torch.linalg.vector_norm(x) for x in tensors] for tensors in (means, own)]
    found = torch.tensor([not all(bool(n.isfinite()) for n in of) for of in norms])
    is_wrong, is_own = loop.adapter.ranks.max_over_stages(found.float()).tolist()
    if is_wrong:
        whose = "this cluster" if is_own else "another cluster"
        raise NonFiniteError(
            f"step {loop.history.step}: the clusters' average is not finite, as the weights of "
            f"{whose} are not; resume from an earlier checkpoint, with a lower learning rate or "
            "other data"
        )


def _read_copy(loop: OuterLoop, fragment: int) -> Tensor:
    numel = loop.adapter.fragments[fragment].numel
    local = torch.empty(numel, device=loop.adapter.device)
    loop.adapter.read(fragment, local)
    return local
