"""At the end of a run: did all clusters apply the same means last? No later header would tell.

Two verbs, as in export.py, so that clusters which share one process can all send before any waits.
"""

from __future__ import annotations

import torch

from dsx.core.transport import COMPARISON, Pending, Submission
from dsx.outer.loop import OuterLoop
from dsx.outer.parity_check import Verdict
from dsx.outer.transfer import Arrived


def begin_comparison(loop: OuterLoop) -> list[tuple[Verdict, Pending]]:
    """Start exchanging headers once more, for every fragment."""
    started: list[tuple[Verdict, Pending]] = []
    for fragment, line in zip(loop.backend.fragments, loop.state.lines, strict=True):
        verdict, pending = Verdict(), Arrived(torch.empty(0))
        if loop.state.is_sent(fragment.id):
            what = Submission(fragment.id, loop.history.step, COMPARISON)
            pending = loop.transport.submit(what, line.confirm(verdict))
        started.append((verdict, pending))
    return started


@torch.no_grad()
def end_comparison(loop: OuterLoop, started: list[tuple[Verdict, Pending]]) -> None:
    """Judge what the headers told; where this cluster was wrong, its masters take the new anchor.

    Collective over the cluster's ranks. The masters then want publishing.
    """
    for fragment, (verdict, pending) in enumerate(started):
        pending.wait()
        loop.totals.bytes_sent += pending.bytes_sent
        loop.judge.judge(fragment, loop.history.launched[fragment], verdict, loop.history)
        has_anchor = loop.method.outer_optimizer.keeps_anchor
        if has_anchor and loop.transport.cluster_id in verdict.differing:
            loop.backend.write(fragment, loop.state.anchor[fragment])
