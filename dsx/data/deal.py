"""Who reads what is left of a cluster's share while it is gone, and where it goes on itself.

Each of the C clusters has a sequence of samples without an end: its part of the data in the order
of the first epoch, then in that of the second. A place is a number of samples from the beginning of
a sequence. Each epoch of it is cut into shards, stretches of one after another.

A cluster that trains reads its own sequence, and nobody else does. While it is gone, its sequence
is dealt to the others from the place that is in a committed contribution, a shard at a time, where
theirs are farther than it is: so all sequences are read at one pace. Back again, it goes on behind
what has been dealt; shards that others hold they read to their ends.

A `Deal` is a state machine without clock or chance. What it is told are the transfers that have
been applied, in their order, which is one for all clusters: who averaged, and at which places they
were at the launch. So it is the same in all of them at the same step, and says the same.

    here      has its part in transfers
    leaving   a transfer was averaged without it; others that are under way may still have it
    away      all that were under way then have been applied: what it has committed is known
    coming    away, and a process of it is healing: nobody is dealt of its sequence. That process
              reads from there on once all launches are applied that one before it may be in
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Stretch:
    """Places `start`..`stop` - 1 of the sequence of cluster `of`.

    `among` so many clusters, where the data was cut for another number than it is now; else 0.
    """

    of: int
    start: int
    stop: int
    among: int = 0

    def behind(self, count: int) -> Stretch:
        """Return what is left of it after so many samples."""
        return replace(self, start=min(self.start + count, self.stop))

    def plain(self) -> list[int]:
        """Return it as JSON values, which its fields are made of again."""
        return [self.of, self.start, self.stop, *([self.among] if self.among else [])]


@runtime_checkable
class Dealt(Protocol):
    """What reads samples by sequences, and can be given stretches of others'."""

    @property
    def samples_per_epoch(self) -> int | None:
        """Samples of one epoch of a sequence; None where it cannot be dealt (says why not)."""
        ...

    def place(self) -> tuple[int, int]:
        """Return the place in the own sequence, and how many samples of others' have been read."""
        ...

    def left(self) -> list[Stretch]:
        """Return what is still to be read of others'."""
        ...

    def require_same_data(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless a saved position is in this data, whoever's part it was."""
        ...

    def begin_at(self, place: int, read: int, left: Sequence[Stretch]) -> None:
        """Read `left` of what others have left, of which `read` samples are read; then go on there.

        `place` is in the own sequence.
        """
        ...

    def take_over(self, stretches: Sequence[Stretch]) -> None:
        """Read these before going on with the own sequence."""
        ...


@dataclass
class Share:
    """One cluster, as all know it; places and counts are of committed contributions.

    `place` in its own sequence; while it is away, where dealing goes on. `read` of what it has been
    dealt, since it came; `held` is that, `dropped` what of it was read to the end and is forgotten.
    """

    place: int = 0
    read: int = 0
    held: list[Stretch] = field(default_factory=list[Stretch])
    dropped: int = 0
    state: str = "here"
    until: int = 0  # of one who is leaving: the last launch that may still have it

    @property
    def left(self) -> list[Stretch]:
        """What it holds and has not committed."""
        count, left = self.read - self.dropped, list[Stretch]()
        for stretch in self.held:
            rest = stretch.behind(count)
            count = max(0, count - (stretch.stop - stretch.start))
            if rest.start < rest.stop:
                left.append(rest)
        return left


class Deal:
    """What all clusters know of one data set; `samples_per_epoch` of each sequence."""

    def __init__(self, num_clusters: int, samples_per_epoch: int, num_shards: int) -> None:
        """Begin with all clusters here. `num_shards` of each sequence in an epoch, at most."""
        if samples_per_epoch < 1 or num_shards < 1:
            raise ValueError(
                f"samples_per_epoch={samples_per_epoch} and num_shards={num_shards} must be >= 1"
            )
        self.samples_per_epoch, self.num_shards = samples_per_epoch, num_shards
        self._shard = -(-samples_per_epoch // num_shards)
        self.shares = [Share() for _ in range(num_clusters)]
        self.coming: dict[int, tuple[int, int]] = {}  # which process, and the last launch then
        self._first_under_way: float = 0
        self.left_behind: list[Stretch] = []  # held by those who have gone, dealt first
        self.loaded_at = 0  # the last launch before a checkpoint was loaded

    def hear(
        self,
        number: int,
        ids: Collection[int],
        told: Mapping[int, tuple[int, int]],
        coming: Mapping[int, int],
        launched: int,
        is_refused: bool = False,
    ) -> None:
        """Take launch `number`, which has been applied.

        `ids` have averaged, and `told` are their places at the launch; `coming` are those whom one
        of them knows to be healing, and a number of that process. `launched` is the last launch of
        all by now. What is refused contains nothing.
        """
        before, self.coming = self.coming, {}
        for id, process in coming.items():
            is_known = id in before and before[id][0] == process
            self.coming[id] = before[id] if is_known else (process, launched)
        for id, share in enumerate(self.shares):
            if id in ids:
                self.coming.pop(id, None)
                if share.state == "away":
                    share.state = "here"
            elif share.state == "here" and number > self.loaded_at:
                share.state, share.until = "leaving", launched
        if not is_refused:
            self.count({id: at for id, at in told.items() if id in ids})

    def count(self, told: Mapping[int, tuple[int, int]]) -> None:
        """Take what a committed launch contains: the places, at that launch, of who is in it."""
        for id, (place, read) in told.items():
            share = self.shares[id]
            if share.state == "away":
                share.state = "here"
            share.place, share.read = max(share.place, place), max(share.read, read)
            self._forget_read(share)

    def dealt_since(self, id: int, known: int) -> list[Stretch]:
        """Return what a cluster was dealt behind so many samples, counted since it came."""
        end, since = self.shares[id].dropped, list[Stretch]()
        for stretch in self.shares[id].held:
            end += stretch.stop - stretch.start
            since += [stretch] if end > known else []
        return since

    def pass_boundary(self, first_under_way: float) -> dict[int, list[Stretch]]:
        """Return what each cluster is dealt from here on; `first_under_way` is a launch's number.

        Infinity if there is none. To be called at each boundary, once all is heard.
        """
        self._first_under_way = first_under_way
        for share in self.shares:
            if share.state == "leaving" and share.until < first_under_way:
                self._leave_behind(share)
                share.state = "away"
        dealt: dict[int, list[Stretch]] = {}
        here = [id for id, share in enumerate(self.shares) if share.state == "here"]
        while here and self.left_behind:
            self._give(self._least(here), self.left_behind.pop(0), dealt)
        away = [
            id for id, share in enumerate(self.shares)
            if share.state == "away" and id not in self.coming
        ]  # fmt: skip
        while away:
            of = min(away, key=lambda id: (self.shares[id].place, id))
            at = self.shares[of].place
            ahead = [id for id in here if self.shares[id].place > at]
            if not ahead:
                break
            self.shares[of].place = stop = self.end_of_shard(at)
            self._give(self._least(ahead), Stretch(of, at, stop), dealt)
        return dealt

    def may_come(self, id: int, process: int) -> bool:
        """Whether a process that heals may read from `shares[id].place` on from now on."""
        known, until = self.coming.get(id, (None, 0))
        is_settled = until < self._first_under_way
        return self.shares[id].state == "away" and known == process and is_settled

    def load(self, ids: Collection[int], launched: int) -> None:
        """Go on with these alone, behind `launched` launches: a checkpoint has been loaded.

        Whoever was away and is here goes on at `shares[id].place`.
        """
        self.coming, self.loaded_at = {}, launched
        for id, share in enumerate(self.shares):
            if id not in ids or share.state != "here":
                self._leave_behind(share)
            share.state = "here" if id in ids else "away"

    def end_of_shard(self, place: int) -> int:
        """Return where the shard ends that a place is in."""
        epoch, offset = divmod(place, self.samples_per_epoch)
        stop = min((offset // self._shard + 1) * self._shard, self.samples_per_epoch)
        return epoch * self.samples_per_epoch + stop

    def state_dict(self) -> dict[str, Any]:
        """Return JSON values, the same in all clusters."""
        shares = [
            [s.place, s.read, [one.plain() for one in s.held], s.dropped, s.state, s.until]
            for s in self.shares
        ]
        return {
            "samples_per_epoch": self.samples_per_epoch, "num_shards": self.num_shards,
            "shares": shares, "coming": [[id, *known] for id, known in sorted(self.coming.items())],
            "left_behind": [one.plain() for one in self.left_behind],
            "loaded_at": self.loaded_at,
        }  # fmt: skip

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> Deal:
        """Return what `state_dict` is of."""
        deal = cls(len(state["shares"]), state["samples_per_epoch"], state["num_shards"])
        deal.shares = [
            Share(place, read, [Stretch(*one) for one in held], dropped, name, until)
            for place, read, held, dropped, name, until in state["shares"]
        ]
        deal.coming = {id: (process, until) for id, process, until in state["coming"]}
        deal.loaded_at = state["loaded_at"]
        deal.left_behind = [Stretch(*one) for one in state["left_behind"]]
        return deal

    def _least(self, ids: Sequence[int]) -> int:
        """Return who holds the fewest samples that are not committed."""
        return min(ids, key=lambda id: (sum(s.stop - s.start for s in self.shares[id].left), id))

    def _leave_behind(self, share: Share) -> None:
        self.left_behind += share.left
        share.held, share.read, share.dropped = [], 0, 0

    def _give(self, to: int, stretch: Stretch, dealt: dict[int, list[Stretch]]) -> None:
        self.shares[to].held.append(stretch)
        dealt.setdefault(to, []).append(stretch)

    def _forget_read(self, share: Share) -> None:
        while share.held:
            length = share.held[0].stop - share.held[0].start
            if share.dropped + length > share.read:
                return
            share.dropped += length
            del share.held[0]
