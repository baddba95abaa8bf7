"""Who averages with whom: the member clusters, and the place of one rank among them.

A `Membership` is made once, where a world is joined or clusters of one process meet, and handed
down to whatever sizes a buffer by the number of clusters. Clusters have ids, which messages and
records name and which stay as others come and go; buffers and messages are indexed by position,
which is a member's place in the order of ids. Means are summed in that order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Member:
    """A cluster, by its id, and what it counts in a mean; so far the same for all.

    `process` is its incarnation, 0 where nobody can come back: one that does is another member.
    """

    id: int
    weight: float = 1.0
    process: int = 0

    def __post_init__(self) -> None:
        _require_integer("a member's id", self.id)
        if isinstance(self.weight, bool) or not isinstance(self.weight, int | float):  # pyright: ignore
            raise TypeError(f"weight={self.weight!r} of cluster {self.id} must be a number")
        _require_integer(f"the process of cluster {self.id}", self.process)


@dataclass(frozen=True)
class Membership:
    """The clusters that average from some `epoch` on, ids ascending; C = `num_clusters`.

    `everyone` are the ids of all that the run may ever have, these ones if empty: what outlives a
    membership has a place for each. `left`: those of the one before that have gone in order.
    """

    epoch: int
    members: tuple[Member, ...]
    everyone: tuple[int, ...] = ()
    left: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require_integer("the epoch of a membership", self.epoch)
        _require_members(self.members)
        if self.epoch < 0:
            raise ValueError(f"epoch={self.epoch} of a membership must be at least 0")
        what = f"the membership of epoch {self.epoch}"
        if not self.members:
            raise ValueError(f"{what} has no members; give it at least one")
        if list(self.ids) != sorted(set(self.ids)) or self.ids[0] < 0:
            raise ValueError(
                f"{what} has members {list(self.ids)}: ids must be at least 0, ascending and "
                "different from each other"
            )
        if self.everyone and not {*self.ids} <= {*self.everyone}:
            raise ValueError(f"{what} has members {list(self.ids)}, not all of {self.everyone}")
        for member in self.members:
            if not (math.isfinite(member.weight) and member.weight > 0):
                raise ValueError(
                    f"{what} gives cluster {member.id} weight={member.weight}: a weight must be "
                    "finite and above 0; leave a cluster out that is not to count"
                )

    @classmethod
    def of(cls, num_clusters: int) -> Membership:
        """Return the clusters 0..num_clusters-1, of one weight, from the beginning on."""
        _require_integer("num_clusters", num_clusters)
        if num_clusters < 1:
            raise ValueError(f"num_clusters={num_clusters} must be at least 1")
        return cls(0, tuple(Member(id) for id in range(num_clusters)))

    @property
    def num_clusters(self) -> int:
        """C."""
        return len(self.members)

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """The members' ids, by position."""
        return tuple(member.id for member in self.members)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The ids of all clusters that the run may have, in their order: the same in all epochs."""
        return tuple(sorted(self.everyone)) or self.ids

    def position_of(self, cluster_id: int) -> int:
        """Return the place of a cluster among the members; ValueError if it is none of them."""
        if cluster_id not in self.ids:
            raise ValueError(
                f"cluster {cluster_id} is not in the membership of epoch {self.epoch}, whose "
                f"members are {list(self.ids)}"
            )
        return self.ids.index(cluster_id)

    def require_equal_weights(self) -> None:
        """Raise ValueError unless all members count alike: so far no mean is weighted."""
        if len({member.weight for member in self.members}) > 1:
            named = ", ".join(f"{m.weight:g} (cluster {m.id})" for m in self.members)
            raise ValueError(
                f"the membership of epoch {self.epoch} has the weights {named}: means are not "
                "weighted yet, so give all members the same weight"
            )


@dataclass(frozen=True)
class Seat:
    """The place of a rank of one cluster in a membership.

    `shard` is the rank's number among those of its cluster that share a fragment; the ranks that
    exchange with each other have the same.
    """

    membership: Membership
    cluster_id: int
    shard: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.membership, Membership):  # pyright: ignore
            raise TypeError(
                f"membership={self.membership!r} of a seat must be a Membership; "
                "Seat.of(cluster_id, num_clusters) makes one"
            )
        _require_integer("cluster_id", self.cluster_id)
        _require_integer("shard", self.shard)
        self.membership.position_of(self.cluster_id)  # is a member

    @classmethod
    def of(cls, cluster_id: int, num_clusters: int, shard: int = 0) -> Seat:
        """Return the place of a cluster among 0..num_clusters-1, of one weight."""
        return cls(Membership.of(num_clusters), cluster_id, shard)

    @property
    def num_clusters(self) -> int:
        """C."""
        return self.membership.num_clusters

    @property
    def ids(self) -> tuple[int, ...]:
        """All members' ids, by position."""
        return self.membership.ids

    @cached_property
    def position(self) -> int:
        """The place of the own cluster."""
        return self.membership.position_of(self.cluster_id)

    @cached_property
    def place(self) -> int:
        """The place of the own cluster among all that the run may have."""
        return self.membership.places.index(self.cluster_id)

    @cached_property
    def others(self) -> list[int]:
        """The places of the other clusters, in order."""
        return [m for m in range(self.num_clusters) if m != self.position]

    def under(self, membership: Membership) -> Seat:
        """Return the place of the same rank in another membership, which the cluster is in."""
        return replace(self, membership=membership)

    def of_shard(self, shard: int) -> Seat:
        """Return the place of another rank of the same cluster."""
        return replace(self, shard=shard)


def _require_members(members: Any) -> None:
    if not isinstance(members, tuple) or not all(isinstance(m, Member) for m in members):  # pyright: ignore
        raise TypeError(
            f"members={members!r} of a membership must be a tuple of Member, as in "
            "Membership(0, (Member(0), Member(1)))"
        )


def _require_integer(what: str, value: Any) -> None:
    """Raise TypeError for what only compares like one: True, 1.0, "1"."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an integer, not {value!r}")
