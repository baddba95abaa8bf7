"""What clusters send each other about the log. The sender is whom the connection has proved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from dsx.comm.membership import codec
from dsx.comm.membership.bounds import Digest, Key, Lane, Value
from dsx.comm.membership.entries import Ballot, Entry, View, require_lasts, require_weight
from dsx.comm.membership.state import State


@dataclass(frozen=True)
class Report:
    """The attempt at transfer `number` of a lane has ended here, in the epoch of the status."""

    lane: Lane
    number: int
    digest: Digest


@dataclass(frozen=True)
class Saying:
    """What this cluster wants to be said, if it is the first."""

    key: Key
    value: Value
    lasts: int = 0

    def __post_init__(self) -> None:
        require_lasts(self.lasts)


@dataclass(frozen=True)
class Status:
    """All there is to know of a cluster (P5), to the coordinator or whoever may be it."""

    sequence: int  # the newest counts
    accepted: Ballot  # that its log is of
    length: int  # of its log, from the beginning
    index: int  # entries applied
    epoch: int
    links: tuple[int, ...]  # whom it reaches, and itself
    reports: tuple[Report, ...]
    sayings: tuple[Saying, ...]
    request: int  # to join; 0 of a contributor
    answered: int  # the request whose copy it has begun
    ready: int  # entries whose results a joiner has applied; 0 before it has its copy
    weight: float
    is_leaving: bool
    is_finished: bool

    def __post_init__(self) -> None:
        require_weight(self.weight)


@dataclass(frozen=True)
class Append:
    """Entries from `start` on; `index` are applied, `floor` by everybody. Empty: I am alive."""

    ballot: Ballot
    start: int
    entries: tuple[Entry, ...]
    index: int
    floor: int


@dataclass(frozen=True)
class Install:
    """The log's state at a joiner's request (0: at a voter's who fell behind), and the rest."""

    ballot: Ballot
    request: int
    state: State
    tail: tuple[Entry, ...]

    def __post_init__(self) -> None:
        View(self.state.epoch, self.state.contributors, self.state.joiners)  # has its order


@dataclass(frozen=True)
class Prepare:
    """A candidate asks for a promise, and for the log from `index` on."""

    ballot: Ballot
    index: int


@dataclass(frozen=True)
class Promise:
    """To take nothing under lower ballots; with the log from `start` on, `index` applied."""

    ballot: Ballot
    accepted: Ballot
    index: int
    start: int
    tail: tuple[Entry, ...]


@dataclass(frozen=True)
class Refusal:
    """A higher ballot is promised, or the coordinator lives."""

    promised: Ballot


@dataclass(frozen=True)
class Outside:
    """To one that thinks it contributes: the view of `epoch` has gone on without it."""

    ballot: Ballot
    epoch: int


@dataclass(frozen=True)
class AskForLogs:
    """The founder's question, by its number: have you a log?"""

    question: int


@dataclass(frozen=True)
class NoLog:
    """The answer, if there is none."""

    question: int


Message: TypeAlias = (
    Status | Append | Install | Prepare | Promise | Refusal | Outside | AskForLogs | NoLog
)


def encode(message: Message) -> bytes:
    """Return a message's bytes; MessageRefused if a field is beyond its bound."""
    return codec.encode(Message, message)


def decode(data: bytes) -> Message:
    """Return the message of these bytes; MessageRefused, which says why, if they are none."""
    return codec.decode(Message, data)
