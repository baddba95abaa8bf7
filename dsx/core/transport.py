"""The two verbs of a transport, and how a lost peer is reported.

A transport averages over clusters for one shard coordinate: the ranks with the same place in each
cluster. Submissions for one fragment are served in order (one FIFO per fragment); every rank of
such a group must submit the same fragments in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from dsx.core.exchange import Exchange
from dsx.core.leaving import Reason
from dsx.core.membership import Seat
from dsx.core.types import Stage

VERBS = ("launched", "averaged for export", "compared", "and all others hashed for the start")
TRAINING, EXPORT, COMPARISON, START, HAND_OVER, RESUMING = range(6)


class PeerLost(RuntimeError):
    """Another cluster closed its connection or missed a deadline; the message names both."""

    cluster: int | None = None  # which, if it is known


class PeerPreempted(PeerLost):
    """Another cluster has ended because it was told to, and this one is to save and end, too."""

    reason = Reason(0)
    gone: tuple[int, ...] = ()  # the clusters that are lost, if it is for that


@dataclass(frozen=True)
class Submission:
    """What is exchanged: of a fragment, at an inner step; `purpose` is an index of `VERBS`, or
    `HAND_OVER` (`step` is the round then) or `RESUMING`.

    `number` counts the launches of a run from 1, over all fragments of a stage and all of its
    resumes, so that clusters which resume at different steps meet; 0 for what is no launch.
    `notes` is what this cluster tells all others beside it (`Pending.notes`), its own and no part
    of what has to be the same.
    """

    fragment: int
    step: int
    purpose: int = TRAINING
    number: int = 0
    notes: bytes = field(default=b"", compare=False, repr=False)

    def __str__(self) -> str:
        return self.on(Stage())

    def on(self, stage: Stage) -> str:
        """Return what messages call it."""
        if self.purpose == RESUMING:
            return "telling what was under way, after a resume"
        if self.purpose == HAND_OVER:
            return f"{stage.name_of(self.fragment)}, launch {self.step} handed over after a resume"
        return f"{stage.name_of(self.fragment)} {VERBS[self.purpose]} at step {self.step}"


class Farewells(Protocol):
    """What clusters say before they end. Nothing here waits."""

    @property
    def gone(self) -> tuple[int, ...]:
        """The clusters that are lost, where this one has to end for that."""
        ...

    def heard_reason(self) -> Reason | None:
        """Return why another cluster is about to end, if one has said so."""
        ...

    def say_reason(self, reason: Reason) -> None:
        """Tell all why this one is."""
        ...

    def say_saved(self) -> None:
        """Tell all that this one has saved; after `say_reason`."""
        ...

    def have_saved(self) -> bool:
        """Whether all others have said both, or have gone."""
        ...


class Pending(ABC):
    """A transfer under way.

    - `bytes_sent`: the payload this rank has handed to the network for other clusters so far;
    - `seconds`: from the exchange's start to its end without the launch handshake; 0 before. The
      wait until all have come is so left out, and with it the handshake's two latencies;
    - `coding_seconds`: those of them that were not spent on messages, nor on waits for cores:
      copies awaited, coding, sums;
    - `turn_seconds`: those of them that its thread has waited for a turn to code (cores.py);
    - `commit_seconds`: those of them until all have told what they hold: the last round trip;
    - `notes`: once it has ended, what clusters told beside it, the own one, too: by id.
    """

    bytes_sent = 0
    seconds = 0.0
    coding_seconds = 0.0
    turn_seconds = 0.0
    commit_seconds = 0.0
    notes: Mapping[int, bytes] = MappingProxyType({})

    @abstractmethod
    def wait(self) -> Tensor:
        """Block until the mean is there and return it; may be called again. Raises `PeerLost`."""

    def wait_unless(self, event: Future[Any]) -> bool:
        """Block until it has ended, or failed, or `event` is done; return whether it has.

        What cannot wait for both is waited for as a whole.
        """
        self.wait()
        return True

    @property
    @abstractmethod
    def has_arrived(self) -> bool:
        """Whether the mean is there, and nothing of it is written any more."""


class Transport(Protocol):
    """Moves tensors between the clusters for one shard coordinate."""

    @property
    def seat(self) -> Seat:
        """This cluster among those that average."""
        ...

    def submit(
        self, what: Submission, exchange: Exchange, again: Callable[[], Exchange] | None = None
    ) -> Pending:
        """Start averaging and return at once.

        Tensors that the exchange yields must not be touched until `wait` has returned. Peers
        whose submissions differ are told so, instead of averaging what does not belong together.
        `again` makes the exchange anew, from the same contribution, for an attempt under another
        membership (`follow_views`); without it, what is under way when that changes is lost.
        """
        ...

    def follow_views(self, reopen: Callable[[Seat, int | None], object]) -> None:
        """Have `reopen` called where the membership changes, before anything goes on under it.

        With a fragment, or None for all; on another thread than training's, while no exchange of it
        is under way. Again under the same membership it is for nothing.
        """
        ...

    def spread(
        self,
        fragment: int,
        tensor: Tensor,
        chain: Sequence[int],
        moved: Callable[[int], None],
        index: int = -1,
    ) -> int:
        """Overwrite `tensor`, fp32 `[n]`, in place with that of the first in `chain`. Blocks.

        Those in the chain, places of members, call it; each has it from the one before. `moved`
        hears of bytes that have come or gone. Returns the bytes that this one has sent. Raises
        `PeerLost`. `index` is the tensor's among those that `offer` tells of, if it is one.
        """
        ...

    def gather(self, what: str, value: Any) -> Callable[[], Sequence[Any]]:
        """Start telling the peers a small JSON value; what is returned waits for theirs.

        It gives one of each member, by position, or raises `PeerLost`. `what` is the same in all
        clusters, which call it in the same order.
        """
        ...

    def offer(self, shared: Callable[[int], Sequence[Tensor]]) -> None:
        """Tell what a fragment's outer state is, for a cluster in this process that is ahead."""
        ...

    @property
    def farewells(self) -> Farewells | None:
        """Where clusters tell each other why they end; None if they cannot."""
        ...

    def close(self) -> None:
        """Release threads and connections; nothing may be submitted afterwards."""
        ...
