"""Places in the data that a checkpoint holds, and what all clusters make of theirs.

A mean that has come and is not applied yet is in the checkpoint, and so is what it contains: the
places that travelled beside it are kept with it, by launch. Whoever goes on from there counts them
as committed at once, as somebody may be gone whose last part in the run that was.

Clusters may have saved at different steps, or in the midst of a boundary, so that one has dealt
what another has not heard of yet. All go on from the deal of the one that had applied most, which
contains what the others know; what others hold of a launch that this one had not applied counts,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dsx.data.deal import Deal, Stretch
from dsx.outer.notices import places_in
from dsx.outer.transfer import NothingYet, Transfer

Told = Mapping[str, Mapping[str, Sequence[int]]]  # by cluster's id, and name of the data


def told_beside(transfer: Transfer) -> Told:
    """Return the places that travelled beside a mean that has come, as JSON values.

    Of what is refused, which contains nothing, there are none.
    """
    attempt, parity = transfer.attempt, transfer.buffers.parity
    if parity.is_refused or parity.refused_by or parity.uncommitted or parity.apart:
        return {}
    found = places_in(attempt.notes or transfer.pending.notes)
    fresh = {str(id): said["at"] for id, said in found.items() if id in parity.ids}
    return fresh or attempt.told


def take_told(in_flight: Sequence[Transfer | NothingYet]) -> dict[int, Told]:
    """Return what was told beside the means of a checkpoint, by launch; each is told of once."""
    found: dict[int, Told] = {}
    for transfer in in_flight:
        if isinstance(transfer, Transfer) and transfer.attempt.told:
            found[transfer.attempt.what.number] = transfer.attempt.told
            transfer.attempt.told = {}
    return found


@dataclass(frozen=True)
class SavedPlaces:
    """What one cluster's checkpoint says, as JSON values; `takes_others`: it is another one's.

    `deals` by name, as of `Places.saved_state`, of which `foreign` are of other data than is read
    now. Of `launched` launches those `under_way` had not been applied. `told` are pairs of a launch
    and what was told beside its mean.
    """

    cluster: int
    deals: Mapping[str, Any]
    foreign: Sequence[str]
    takes_others: bool
    step: int
    launched: int
    under_way: Sequence[int]
    told: Sequence[tuple[int, Told]]

    @property
    def applied(self) -> tuple[int, int]:
        """How far it has come: launches applied, and inner steps."""
        return self.launched - len(self.under_way), self.step

    @property
    def cut(self) -> dict[str, str]:
        """Say how each of the data is cut."""
        return {
            name: f"{len(deal['shares'])} parts of {deal['samples_per_epoch']} samples in "
            f"{deal['num_shards']} shards" + " of other data" * (name in self.foreign)
            for name, deal in self.deals.items()
        }

    def lacks(self, number: int) -> bool:
        """Whether a launch had not been applied."""
        return number in self.under_way or number > self.launched


class AgreedPlaces:
    """What all clusters go on from, the same in all of them: `saved` is what each has told."""

    def __init__(self, saved: Sequence[SavedPlaces]) -> None:
        """Raise ValueError, in all clusters, if they have not saved the same data, cut alike."""
        self._saved = saved
        first, *others = saved
        if different := [one for one in others if one.cut != first.cut]:
            told = "; ".join(f"cluster {one.cluster}: {one.cut}" for one in (first, *different))
            raise ValueError(
                f"the clusters' checkpoints do not say alike how the data are cut ({told}): load "
                "one checkpoint of the same run in all clusters, and give them the same data"
            )
        of_own = [one for one in saved if not one.takes_others] or saved
        self._farthest = max(of_own, key=lambda one: one.applied)
        self.launched = max(one.launched for one in saved)  # by the one that has launched most

    @classmethod
    def of(cls, own: SavedPlaces, gather: Callable[[Any], Sequence[Any]]) -> AgreedPlaces:
        """Tell all, and hear of all. Collective over all clusters."""
        return cls([SavedPlaces(**one) for one in gather(asdict(own))])

    def deal(self, name: str) -> Deal:
        """Return that of the one that had applied most, with all in it that is committed."""
        farthest = self._farthest
        deal = Deal.of_state(farthest.deals[name])
        for one in self._saved:
            for number, told in one.told:
                if farthest.lacks(number):
                    places = {int(id): at[name] for id, at in told.items() if name in at}
                    deal.count({id: (place, read) for id, (place, read, _) in places.items()})
        return deal

    def standing(self, name: str, deal: Deal) -> dict[int, tuple[int, list[Stretch]]]:
        """Return by cluster, of those that have their own checkpoint, where it goes on.

        Its place, and what is left of others': what it had been dealt, and what it has been since.
        """
        found: dict[int, tuple[int, list[Stretch]]] = {}
        for one in self._saved:
            if not one.takes_others:
                place, read, left = one.deals[name]["own"]
                stretches = [Stretch(*stretch) for stretch in left]
                known = read + sum(stretch.stop - stretch.start for stretch in stretches)
                found[one.cluster] = place, stretches + deal.dealt_since(one.cluster, known)
        return found
