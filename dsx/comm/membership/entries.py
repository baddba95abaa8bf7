"""The entries of the log, and who they name. All of them are applied by everybody in one order.

An incarnation is one process of a cluster: its start, as a number that grows. A cluster that was
restarted is another member, without a vote (S5). A request is the number of a joiner's try; each
has a copy of its own, because the state that it gets belongs to its place in the log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from dsx.comm.membership.bounds import LASTS, Digest, Key, Lane, Value
from dsx.comm.membership.codec import encode_value


@dataclass(frozen=True, order=True)
class Ballot:
    """Under which a coordinator appends: the owner makes it unique, so no two are equal (S1).

    `branch` is 0, or that of the forced view that all goes on from; others' are not compared (S10).
    """

    number: int = 0
    id: int = 0
    incarnation: int = 0
    branch: int = 0

    def is_of(self, id: int, incarnation: int) -> bool:
        """Return whether it belongs to that process; the ballot of nobody, number 0, to none."""
        return self.number > 0 and (self.id, self.incarnation) == (id, incarnation)


@dataclass(frozen=True)
class Contributor:
    """A process of a cluster that has a vote and a part in every mean, by its weight."""

    id: int
    incarnation: int
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.incarnation < 1:
            raise ValueError(f"incarnation={self.incarnation} of cluster {self.id} must be >= 1")
        require_weight(self.weight)


@dataclass(frozen=True)
class Joiner:
    """A process that wants to become a contributor, in its `request`-th try."""

    id: int
    incarnation: int
    request: int

    def __post_init__(self) -> None:
        if self.incarnation < 1 or self.request < 1:
            raise ValueError(f"{self} must have an incarnation and a request >= 1")


Contributors: TypeAlias = tuple[Contributor, ...]


@dataclass(frozen=True)
class View:
    """From here on these contribute. It ends all attempts of the view before.

    `is_forced`: without some that have a vote, as an operator has said that they do not go on.
    """

    epoch: int
    contributors: Contributors
    joiners: tuple[Joiner, ...] = ()
    is_forced: bool = False

    def __post_init__(self) -> None:
        if not self.contributors:
            raise ValueError(f"the view of epoch {self.epoch} has no contributors")
        _require_ascending(f"contributors of epoch {self.epoch}", (c.id for c in self.contributors))
        _require_ascending(f"joiners of epoch {self.epoch}", (j.id for j in self.joiners))


@dataclass(frozen=True)
class Join:
    """Everybody keeps a copy of its state as of here, for this joiner to fetch."""

    joiner: Joiner


@dataclass(frozen=True)
class Commit:
    """Transfer `number` of a lane is what the attempt (number, epoch) made, by its digest."""

    lane: Lane
    number: int
    epoch: int
    digest: Digest


@dataclass(frozen=True)
class Said:
    """The first to say a key wins; remembered for `lasts` entries, 0 for good."""

    key: Key
    value: Value
    by: int
    lasts: int = 0

    def __post_init__(self) -> None:
        require_lasts(self.lasts)


@dataclass(frozen=True)
class End:
    """All contributors of this epoch have done all of their work; nothing follows."""

    epoch: int


Entry: TypeAlias = View | Join | Commit | Said | End


def encoded(entry: Entry) -> bytes:
    """Return an entry's bytes, the same everywhere: what digests and bounds count."""
    return encode_value(Entry, entry)


def contributor_of(contributors: Contributors, id: int) -> Contributor | None:
    """Return the contributor with that id, of whatever incarnation."""
    return next((c for c in contributors if c.id == id), None)


def has_process(contributors: Contributors, id: int, incarnation: int) -> bool:
    """Return whether that very process is among them."""
    return any((c.id, c.incarnation) == (id, incarnation) for c in contributors)


def require_weight(weight: float) -> None:
    """Raise ValueError for what is no weight in a mean."""
    if not (math.isfinite(weight) and weight > 0):
        raise ValueError(f"weight={weight} must be finite and > 0")


def require_lasts(lasts: int) -> None:
    """Raise ValueError for what is no number of entries to remember something for."""
    if not 0 <= lasts <= LASTS:
        raise ValueError(f"lasts={lasts} must be from 1 to {LASTS} entries, or 0 for good")


def _require_ascending(what: str, ids: Iterable[int]) -> None:
    ids = list(ids)
    if ids != sorted(set(ids)):
        raise ValueError(f"{what} are {ids}: ids must be ascending and differ")
