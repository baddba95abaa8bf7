"""What of a run people are told: found in what training records, on the first rank of a cluster.

Of what all clusters see alike one of them tells: the one of the lowest id, of those that were there
before and are after. What repeats itself is told the first time, and then each time that it has
come twice as often, as the guard does with its alarms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dsx.core.membership import Membership
from dsx.telemetry.notices.notice import Kind, Notice

_FORGOTTEN_AFTER = 6 * 3600.0  # seconds in which nothing of the kind came: then it is news again
_LEFT_OUT = {
    "refused_by": "what it sent was not finite, or far larger than what the others sent",
    "differed_in": "its model was not, to the bit, the one that the others hold: test its memory "
    "and network cards",
    "uncommitted_by": "it came to another mean than the others: test its memory and network cards",
}
_IDLE = "no step in two rounds: the optimizer skips them, as gradients are not finite"


class Happenings:
    """One cluster's; every method returns at once, and does nothing where nobody is told.

    `alarms` are sentences for the guard's kinds of alarm; `loss` returns the last one known.
    """

    def __init__(
        self,
        cluster: int,
        members: tuple[int, ...],
        run: str,
        host: str,
        tells: Sequence[Callable[[Notice], object]],
        alarms: Mapping[str, str],
        loss: Callable[[], float | None],
    ) -> None:
        self.run = run
        self._cluster, self._members, self._host = cluster, members, host
        self._tells, self._alarms, self._loss = tells, alarms, loss
        self._was_finite = True
        self._waits_for: tuple[int, ...] = ()
        self._counts: dict[str, tuple[int, float]] = {}  # how often, and when last
        self._idle: dict[tuple[int, int], Sequence[int] | None] = {}
        self._step = 0
        self.is_ended = False

    def step(self, step: int, membership: Membership) -> None:
        """Take a step, and who trains by then."""
        if not self._tells:
            return
        self._step, self.is_ended = step, False
        if membership.ids != self._members:
            before, self._members = self._members, membership.ids
            self._have_changed(before, membership)
        elif self._waits_for and self._tells_of(self._waits_for):
            text = f"{_names(self._waits_for)} reached again: training goes on"
            self._tell("back", text, self._waits_for)
        self._waits_for = ()
        loss = self._loss()
        is_finite = loss is None or math.isfinite(loss)
        if self._was_finite and not is_finite:
            text = f"the loss of cluster {self._cluster} is {loss} at step {step}"
            self._tell("diverging", text, [self._cluster])
        self._was_finite = is_finite

    def sync(self, record: Mapping[str, Any]) -> None:
        """Take the record of a sync, of the whole cluster, which all clusters have."""
        if not self._tells or self._cluster != min(self._members):
            return
        what = f"a round of fragment {record['fragment']}"
        if "stage" in record:
            what += f" of stage {record['stage']}"
        what += f", launched at step {record['launched_step']}"
        for key, why in _LEFT_OUT.items():
            if clusters := record.get(key):
                text = f"{_names(clusters, 'was', 'were')} left out of {what}: {why}"
                self._repeated("left_out", f"{key} {clusters}", text, clusters)
        place, clusters = (record.get("stage", 0), record["fragment"]), record.get("idle_in")
        was_idle, self._idle[place] = self._idle.get(place), clusters
        if clusters and clusters == was_idle:  # one round of a cluster that has just come back is
            text = f"{_names(clusters, 'takes', 'take')} {_IDLE} ({what})"
            self._repeated("diverging", f"idle {clusters}", text, clusters)
        for alarm in record.get("guard_alarms", ()):
            text = f"the guard's alarm {alarm!r} in {what}: {self._alarms.get(alarm, alarm)}"
            self._repeated("diverging", f"alarm {alarm}", text, self._members)

    def rolled_back(self, why: str, step: int) -> None:
        """Take that training goes back, from a step; all clusters do."""
        if self._tells and self._cluster == min(self._members):
            text = f"training goes back to a checkpoint, from step {step}: {why}"
            self._tell("diverging", text, self._members)

    def not_saved(self, why: str) -> None:
        """Take that this cluster could not save."""
        if self._tells:
            self._repeated("not_saved", "", why, [self._cluster])

    def not_copied(self, why: str) -> None:
        """Take that this cluster could not copy a checkpoint to its remote place."""
        if self._tells:
            self._repeated("not_copied", "", why, [self._cluster])

    def waits(self, step: int, gone: tuple[int, ...], seconds: float) -> None:
        """Take that this cluster stands still until others are back, for so long at most."""
        if not (self._tells and gone):
            return
        self._waits_for, self._step = gone, step
        if self._tells_of(gone):
            text = f"{_names(gone)} lost, and cluster {self._cluster} cannot go on alone: it has "
            text += f"saved at step {step}, and waits for up to {seconds / 60:.0f} min"
            self._tell("lost", text, gone)

    def end(self, step: int, how: str, is_own: bool) -> None:
        """Take how training ended; `is_own`: this cluster's part alone, and not all of it."""
        if not self._tells or self.is_ended:
            return
        self.is_ended, self._step = True, step
        if not is_own and self._cluster != min(self._members):
            return
        if how == "finished":
            self._tell("finished", f"finished at step {step}", self._members)
            return
        who = f"cluster {self._cluster} has" if is_own else "training has"
        clusters = [self._cluster] if is_own else self._members
        self._tell("ended", f"{who} ended at step {step}: {how}", clusters)

    def _have_changed(self, before: tuple[int, ...], now: Membership) -> None:
        """Tell who is gone and who is back, once for all clusters."""
        stayed = sorted({*before} & {*now.ids})
        if not stayed or self._cluster != stayed[0]:
            return
        train = f"{now.num_clusters} of {len(now.places)} train on at step {self._step}"
        gone = [id for id in before if id not in now.ids]
        left = [id for id in gone if id in now.left]
        known = [id for id in gone if id in self._waits_for and id not in left]
        lost = [id for id in gone if id not in (*left, *known)]
        if known:
            named = ", ".join(f"cluster {id}" for id in known)
            self._tell("lost", f"training goes on without {named}: {train}", known)
        if lost:
            self._tell("lost", f"{_names(lost)} lost: {train}", lost)
        if left:
            self._tell("lost", f"{_names(left, 'has', 'have')} left in order: {train}", left)
        if back := [id for id in now.ids if id not in before]:
            self._tell("back", f"{_names(back)} back: {train}", back)

    def _tells_of(self, gone: Sequence[int]) -> bool:
        """Whether this one is the first of those that stand still until others are back."""
        return self._cluster == min({*self._members} - {*gone}, default=self._cluster)

    def _repeated(self, kind: Kind, key: str, text: str, clusters: Sequence[int]) -> None:
        """Tell it the first time, and then the 2nd, the 4th, the 8th."""
        count, last = self._counts.get(key, (0, 0.0))
        now = time.monotonic()
        count = 1 if now > last + _FORGOTTEN_AFTER else count + 1
        self._counts[key] = count, now
        if count & (count - 1) == 0:
            self._tell(
                kind, text if count == 1 else f"{text} (the same {count} times by now)", clusters
            )

    def _tell(self, kind: Kind, text: str, clusters: Sequence[int]) -> None:
        notice = Notice(
            kind, text, self._cluster, tuple(clusters), self._step, self.run, self._host,
            time.time(),
        )  # fmt: skip
        for tell in self._tells:
            tell(notice)


def _names(clusters: Sequence[int], one: str = "is", several: str = "are") -> str:
    named = ", ".join(f"cluster {id}" for id in clusters)
    return f"{named} {one if len(clusters) == 1 else several}"
