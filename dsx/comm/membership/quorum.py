"""Who may decide: strictly more than half of a view, so two halves of a cut never both go on."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from dsx.comm.membership.entries import Contributor, Contributors


def is_quorum(
    contributors: Contributors,
    processes: Mapping[int, int],
    newest: Mapping[int, int],
    arbiter: int | None,
    out: Collection[tuple[int, int]] = (),
) -> bool:
    """Return whether `processes`, id to incarnation, are more than half of a view (S2).

    A restarted process does not count: it has forgotten what it voted for (S5). The arbiter counts
    half a vote more, which decides even splits and nothing else. Of two clusters without an
    arbiter, one goes on alone once the other's process is known to have ended, because the same
    cluster has come back: `newest` has the last incarnation that was met of each.

    Of processes in `out`, id and incarnation, an operator has said that they do not go on: a view
    is that of the others then (S10).
    """
    left = tuple(c for c in contributors if (c.id, c.incarnation) not in out)
    contributors = left or contributors
    here = [c for c in contributors if processes.get(c.id) == c.incarnation]
    if 2 * _votes(here, arbiter) > _votes(contributors, arbiter):
        return True
    ended = [c for c in contributors if newest.get(c.id, 0) > c.incarnation]
    return len(contributors) == 2 and arbiter is None and len(here) == len(ended) == 1


def _votes(contributors: Iterable[Contributor], arbiter: int | None) -> int:
    return sum(2 + (c.id == arbiter) for c in contributors)
