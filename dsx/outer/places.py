"""Where each cluster is in its data, told beside its launches; and what they deal from that.

With each launch goes how many samples the contribution has in it. Where the launch is applied, at
one step in all clusters, all so know the same places: those that are in a committed contribution.
The deal (data/deal.py) follows from them. What a rank has heard goes into the collective of
recovery.py: one that owns nothing of a fragment hears nothing, and a shard may have been averaged
by other members than the next.

Nothing is told where nothing is dealt: in a run whose members cannot be lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx.data.deal import Deal, Dealt
from dsx.outer.parity_check import ParityResult

logger = logging.getLogger(__name__)


@dataclass
class _Followed:
    """A data set that is dealt: what reads it here, and what all know of it."""

    reads: Dealt
    deal: Deal
    at_boundary: tuple[int, int]


class Places:
    """Of one rank."""

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}  # by the names that it is tracked under
        self._saved: Mapping[str, Any] = {}  # of names that are not followed yet
        self._agreed: list[list[float]] = []
        self._id = 0
        self.coming: Callable[[], Mapping[int, int]] = dict[int, int]  # who takes from this rank
        self.process = 0  # a number of this one, where it is to heal
        self.is_reading = True  # not while this cluster heals

    def follow(
        self, name: str, reads: Dealt, cluster_id: int, num_clusters: int, num_shards: int
    ) -> None:
        """Deal what `reads` reads, the same in all clusters, to those who are left."""
        length = reads.samples_per_epoch
        assert length is not None
        deal = Deal(num_clusters, length, num_shards)
        if name in self._saved:
            deal = Deal.of_state(self._saved[name])
        self._id = cluster_id
        self._followed[name] = _Followed(reads, deal, reads.place())

    def num_shards(self, name: str) -> int:
        """Return into how many shards a part of an epoch is cut."""
        return self._followed[name].deal.num_shards

    def __contains__(self, name: str) -> bool:
        return name in self._followed

    @property
    def names(self) -> list[str]:
        """The data that are dealt."""
        return sorted(self._followed)

    def to_say(self, is_before_update: bool) -> dict[str, Any]:
        """Return what a launch takes along, as JSON values; empty if nothing is dealt.

        `is_before_update`: what is sent has nothing of this inner step in it yet.
        """
        if not self._followed or not self.is_reading:
            return {}
        at: dict[str, list[int]] = {}
        for name, one in self._followed.items():
            place = one.at_boundary if is_before_update else one.reads.place()
            at[name] = [*place, one.deal.samples_per_epoch]
        return {"at": at, "coming": [*self.coming().items()]}

    def rows(self, ids: Sequence[int], told: Mapping[int, Mapping[str, Any]]) -> list[list[float]]:
        """Return what has come beside a transfer, in numbers >= 0 of which the largest count.

        Two rows for each data set, by the places of `ids`; then who is coming. ValueError where
        another cluster's data has another size.
        """
        rows: list[list[float]] = []
        for name, one in sorted(self._followed.items()):
            at = {id: said["at"][name] for id, said in told.items() if name in said["at"]}
            for id, (_, _, length) in at.items():
                if length != one.deal.samples_per_epoch:
                    raise ValueError(
                        f"{name!r}: cluster {id} has {length:,} samples in an epoch, this one "
                        f"{one.deal.samples_per_epoch:,}; what one has not read is dealt to the "
                        "others, so give all of them the same data, or set clusters.data_shards=0"
                    )
            rows += [[1.0 + at[id][row] if id in at else 0.0 for id in ids] for row in (0, 1)]
        if self._followed:
            named = [pair for said in told.values() for pair in said["coming"]]
            coming = {id: process for id, process in sorted(named)}
            rows.append([float(coming.get(id, 0)) for id in ids])
        return rows

    def agree(self, rows: list[list[float]]) -> None:
        """Take what all ranks of the cluster have heard together."""
        self._agreed = rows

    def hear(self, number: int, ids: Sequence[int], parity: ParityResult, launched: int) -> None:
        """Take launch `number`, which has been applied; `launched` is the last one by now.

        `ids` are those of `rows`.
        """
        if not self._agreed:
            return
        coming = {id: int(n) for id, n in zip(ids, self._agreed[-1], strict=True) if n}
        for index, (_, one) in enumerate(sorted(self._followed.items())):
            pairs = zip(ids, *self._agreed[2 * index : 2 * index + 2], strict=True)
            told = {id: (int(place) - 1, int(read) - 1) for id, place, read in pairs if place}
            one.deal.hear(number, parity.ids, told, coming, launched, parity.is_refused)
        self._agreed = []

    def pass_boundary(self, first_under_way: float) -> None:
        """Give what reads here what it is dealt; once all is applied that is ripe."""
        for name, one in self._followed.items():
            dealt = one.deal.pass_boundary(first_under_way)
            for id, stretches in dealt.items():
                logger.info("%r: cluster %d takes over %s", name, id, stretches)
            if own := dealt.get(self._id):
                one.reads.take_over(own)
            one.at_boundary = one.reads.place()

    @property
    def may_come(self) -> bool:
        """Whether this cluster, which heals, knows where in its data it goes on."""
        return all(one.deal.may_come(self._id, self.process) for one in self._followed.values())

    def begin_reading(self, names: Collection[str] | None = None) -> None:
        """Go on where the deal says: this cluster has healed, or was not there at a save.

        With `names` in those alone: of others no deal is known.
        """
        self.is_reading = True
        for name, one in self._followed.items():
            if names is not None and name not in names:
                continue
            share = one.deal.shares[self._id]
            one.reads.begin_at(share.place, share.read, share.left)
            one.at_boundary = one.reads.place()

    def state_dict(self) -> dict[str, Any]:
        """Return what all clusters know, the same in all of them, as JSON values."""
        return {name: one.deal.state_dict() for name, one in self._followed.items()}

    def load(self, state: Mapping[str, Any], is_of_others: bool = False) -> None:
        """Go on from what was known; `is_of_others`: what they do not deal is not dealt here."""
        self._saved, self._agreed = state, []
        for name in self._followed.keys() - state.keys() if is_of_others else ():
            logger.warning("%r is not dealt between the clusters: others do not track it", name)
            del self._followed[name]
        for name in state.keys() & self._followed.keys():
            one = self._followed[name]
            one.deal = Deal.of_state(state[name])
            one.at_boundary = one.reads.place()

    def resume(self, ids: Sequence[int], launched: int) -> None:
        """Go on with these clusters alone, from a checkpoint that has been loaded."""
        for one in self._followed.values():
            one.deal.load(ids, launched)
            one.at_boundary = one.reads.place()

    def saved_state(self) -> dict[str, Any]:
        """Return what a checkpoint of this cluster keeps: what all know, and its own standing."""
        return {
            name: {
                **one.deal.state_dict(),
                "own": [*one.reads.place(), [left.plain() for left in one.reads.left()]],
            }
            for name, one in self._followed.items()
        }

    def adopt(self, name: str, deal: Deal, is_own: bool) -> None:
        """Go on from a deal that all clusters have agreed on, from checkpoints.

        `is_own`: what reads here goes on from its own, and with what it has been dealt since.
        """
        one, self._agreed = self._followed[name], []
        one.deal = deal
        if is_own:
            known = one.reads.place()[1] + sum(s.stop - s.start for s in one.reads.left())
            if since := deal.dealt_since(self._id, known):
                one.reads.take_over(since)
        one.at_boundary = one.reads.place()

    def samples_per_epoch(self, name: str) -> int:
        """Return the samples of one part of an epoch, as the data are cut here."""
        length = self._followed[name].reads.samples_per_epoch
        assert length is not None
        return length
