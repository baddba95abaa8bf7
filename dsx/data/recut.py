"""The data is cut for another number of clusters: what was left is dealt, then epochs begin anew.

A run that is resumed with fewer or more clusters ends the epochs that had begun before it begins
the next one with a cut of its own. What nobody has read of them is known from the places of all:
each gets an equal part of it, as near as shards allow, its own first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsx.data.deal import Deal, Stretch

Standing = tuple[int, Sequence[Stretch]]  # a place in the own sequence, what is left of others'


def recut(
    old: Deal, standing: Mapping[int, Standing], num_clusters: int, samples_per_epoch: int
) -> Deal:
    """Return the deal of so many clusters, all here; `held` is what each has to read first.

    `standing` of the old clusters that go on with what they had trained; of others that is gone
    which they have not committed.
    """
    known: dict[int, Standing] = {
        id: standing.get(id, (share.place, share.left)) for id, share in enumerate(old.shares)
    }
    among, length = len(old.shares), old.samples_per_epoch
    epochs = max(-(-place // length) for place, _ in known.values())
    pieces = [replace(one, among=one.among or among) for one in old.left_behind]
    for of, (place, left) in known.items():
        pieces += [replace(one, among=one.among or among) for one in left]
        while place < epochs * length:
            stop = old.end_of_shard(place)
            pieces.append(Stretch(of, place, stop, among))
            place = stop
    new = Deal(num_clusters, samples_per_epoch, old.num_shards)
    quota = -(-sum(one.stop - one.start for one in pieces) // num_clusters)
    loads = [0] * num_clusters
    rest: list[Stretch] = []
    for one in pieces:
        is_own = one.among == among and one.of < num_clusters
        if is_own and loads[one.of] + one.stop - one.start <= quota:
            loads[one.of] += one.stop - one.start
            new.shares[one.of].held.append(one)
        else:
            rest.append(one)
    for one in rest:
        least = min(range(num_clusters), key=lambda id: (loads[id], id))
        loads[least] += one.stop - one.start
        new.shares[least].held.append(one)
    for share in new.shares:
        share.place = epochs * samples_per_epoch
    return new
