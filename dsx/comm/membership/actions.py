"""What whoever drives a participant has to do, in this order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dsx.comm.membership.entries import Entry
from dsx.comm.membership.messages import Message
from dsx.comm.membership.state import State


@dataclass(frozen=True)
class Send:
    """Send a message to a peer; it may get lost."""

    peer: int
    message: Message


@dataclass(frozen=True)
class Applied:
    """Entry `index` is decided, and `state` is the log's with it.

    `is_contributor`: of a commit, the result is the one that is held here; otherwise it has to be
    fetched from the contributors and checked against the commit's digest. A view ends attempts:
    what is not committed of them is thrown away, and made again from the same contribution. A join
    asks contributors for a copy of their state as of here.
    """

    index: int
    entry: Entry
    state: State
    is_contributor: bool


@dataclass(frozen=True)
class Copy:
    """Fetch the state that belongs to the first `state.index` entries, then say `ready`."""

    request: int
    state: State


@dataclass(frozen=True)
class Dropped:
    """This cluster contributes no more; it has asked to join again, and a `Copy` will follow."""


@dataclass(frozen=True)
class Stopped:
    """This cluster must not go on, and why; no event has any effect from here on."""

    reason: str


Action: TypeAlias = Send | Applied | Copy | Dropped | Stopped
