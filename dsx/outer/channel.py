"""A fragment's channel to the other clusters: header, codes, sideband, transfer after transfer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from inspect import signature
from threading import Lock
from types import MappingProxyType
from typing import cast

import torch
from torch import Tensor

from dsx.compress.averaging import ExactMean
from dsx.compress.base import Channel, CodingError, Compressor, EncodingChannel, Launch
from dsx.core.buffers import Opening
from dsx.core.cores import Turn, turn_inside
from dsx.core.exchange import Exchange, in_turn
from dsx.core.membership import Seat
from dsx.core.types import Fragment
from dsx.outer.commit import ATTEMPTS, Commit
from dsx.outer.parity_check import ParityCheck, ParityResult
from dsx.outer.sideband import Sideband, with_sideband
from dsx.outer.state_before import StateBefore

logger = logging.getLogger(__name__)


class FragmentChannel:
    """The parity check and the codec of one fragment on this rank, and what a checkpoint keeps.

    All of its buffers are those of one membership, until it is opened under another. What `opening`
    returns is for the codec, if it takes that: one of your own may do without. A `turn` is held
    while something is coded, or hashed.

    The `gate` is held while it is opened anew, looked at for a checkpoint, or coded at a launch;
    each fragment has its own. What is on a disk is read before either is taken (`read_ahead`), so
    that nobody waits for another's disk. Residuals in bf16 or int8 that decay share one work space,
    and wait for each other.
    """

    def __init__(
        self,
        compressor: Compressor,
        fragment: Fragment,
        max_rank: int,
        seat: Seat,
        opening: Callable[[], Opening] = Opening,
        max_norm_ratio: float | None = None,
        turn: Turn = nullcontext,
    ) -> None:
        self._compressor = compressor
        self._fragment = fragment
        self._max_rank = max_rank
        self._opening = opening
        self._max_norm_ratio = max_norm_ratio
        self._turn = turn
        self.gate = Lock()
        self._open(seat)

    def _open(self, seat: Seat) -> None:
        self.seat = seat
        opening, open = self._opening(), self._compressor.open
        self._of_state = opening.state  # counted as long as it is here
        self._read_ahead = opening.read_ahead
        takes_it = "opening" in signature(open).parameters
        also = (opening,) if takes_it else ()
        self.codec: Channel = open(self._fragment, seat, self._max_rank, *also)
        self.parity_check = ParityCheck(seat, opening.buffers, self._max_norm_ratio)
        self._sideband_mean = ExactMean(seat, "sideband", opening.buffers)
        self._commit = Commit(seat)
        changed = {f"codec.{name}": tensor for name, tensor in self.codec.slots.items()}
        self._at_launch = opening.at_launch
        if opening.at_launch:  # those are of who encodes, and when
            for name, error in self.codec.errors.items():
                if not error.is_of_mean:
                    del changed[f"codec.{name}"]
        settled = {f"codec.{n}": self.codec.slots[n] for n in getattr(self.codec, "settled", ())}
        changed = {name: tensor for name, tensor in changed.items() if name not in settled}
        memory = self.parity_check.memory
        self.before = StateBefore(changed, memory, opening.before, settled)

    def open(self, seat: Seat) -> None:
        """Go on under another membership; between two transfers, none being under way.

        What is of the same shape and the same elements there is carried: residuals, warm starts,
        what the parity check remembers, codes that were made at a launch. The rest starts from
        zero. What an attempt has changed that did not end is undone before.
        """
        next_round = self.before.ended + 1
        self.before.put_back(next_round)
        codec, memory = self.codec, self.parity_check.memory
        self._open(seat)
        for number in range(self._at_launch):  # those of launches in a row lie side by side
            messages = cast(EncodingChannel, self.codec).messages(Launch(number))
            for name, codes in cast(EncodingChannel, codec).messages(Launch(number)).items():
                messages[name].copy_(codes)
        self.restored(next_round, probes=_probes_of(codec))
        self.parity_check.memory.copy_(memory)
        not_carried = _carry(codec, self.codec)
        if not_carried:
            logger.warning(
                "fragment %d: state of other elements than under the membership of epoch %d is "
                "left behind, and what takes its place starts from zero: %s",
                self._fragment.id, seat.membership.epoch, ", ".join(not_carried),
            )  # fmt: skip

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """State by name: the codec's, and what the parity check remembers."""
        named = {f"codec.{name}": tensor for name, tensor in self.codec.slots.items()}
        return {**named, "parity_check.memory": self.parity_check.memory}

    @property
    def probes(self) -> Mapping[str, Tensor]:
        """What the codec has seen of the contribution coded last, by name: for a checkpoint."""
        return _probes_of(self.codec)

    def restored(
        self,
        next_round: int,
        earlier: Mapping[str, Tensor] | None = None,
        is_settled: bool = False,
        probes: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Begin anew, as `StateBefore.restored`, with what the codec had seen."""
        self.before.restored(next_round, earlier, is_settled)
        for name, tensor in self.probes.items():
            tensor.copy_(probes[name]) if name in probes else tensor.zero_()

    def exchange(
        self,
        sent: Tensor,
        is_finite: Callable[[], bool],
        launch: Launch,
        parity: ParityResult,
        sideband: Sideband,
        measure: Callable[[Tensor], Tensor] | None,
        lay_out: Callable[[], Tensor],
    ) -> Exchange:
        """Average what `lay_out` returns, in place, with the sideband; zeros, and nothing averaged,
        if refused.

        `is_finite` is asked first, and returns once `sent`, the contribution, is there; `lay_out`
        once all have met: it lays it out where it becomes the mean, and the sideband, too. What the
        exchange returns all clusters hold. Where they do not, it is laid out for another attempt;
        after the last one it is as if refused, and `parity.uncommitted` says whose differed.
        """
        places = len(self.seat.membership.places)
        if sideband.shape.num_clusters != places:
            raise ValueError(
                f"fragment {self._fragment.id}: a sideband for {sideband.shape.num_clusters} "
                f"cluster(s), but the run of the membership of epoch {self.seat.membership.epoch} "
                f"has {places}; make its buffers for that number"
            )
        return self._committed(sent, is_finite, launch, parity, sideband, measure, lay_out)

    def read_ahead(self, *more: Tensor) -> None:
        """Return once the codec's state, and `more`, is in memory: for who is about to code.

        Whoever calls it holds neither the gate nor a turn, as it may wait for a disk.
        """
        self._read_ahead([*self.codec.slots.values(), *more])

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Encode a launch before its exchange; `x`, in place, becomes this cluster's share.

        What the wire carries of it: everybody decodes the same of this cluster's codes. Who calls
        it holds a turn.
        """
        cast(EncodingChannel, self.codec).encode(x, launch)

    def take_back(self, share: Tensor) -> None:
        """Keep a share that nobody has applied, `[numel]`, to be sent again, if residuals are kept.

        Of a round that is refused, when later ones may have been encoded.
        """
        for error in self.codec.errors.values():
            if not error.is_of_mean:
                own = share[error.start : error.stop].to("cpu")
                error.residual.write(error.residual.read().add_(own))

    def can_recode(self, launch: Launch) -> bool:
        """Whether the codec's state follows from this cluster's contribution alone.

        Of a codec of your own that does not say, only if it has no state.
        """
        own = getattr(self.codec, "can_recode", None)
        return not self.codec.slots if own is None else bool(own(launch))

    def recode(self, x: Tensor, sent: Tensor, launch: Launch) -> None:
        """Make the codec's state what the exchange of `sent` would leave; if it can.

        `x` holds the same, and is used up.
        """
        if self.codec.slots:
            self.read_ahead()
            with self._turn():
                self.codec.recode(x, launch)
            self._settle(sent, launch)

    def follow(
        self, launch: Launch, x: Tensor, parity: ParityResult, slots: Mapping[str, Tensor]
    ) -> None:
        """Make the state what others have after a transfer that they averaged to `x`, fp32 [n].

        `slots` are those that are the same in all clusters. Own residuals stay as they are.
        """
        self.before.begin(launch.round)
        self.before.met = launch.round
        for name, slot in common_slots(self).items():
            slot.copy_(slots[name])
        if not parity.is_refused:
            self.parity_check.remember(launch.round, self.parity_check.hash_of(x))
        self.before.ended = launch.round

    def confirm(self, parity: ParityResult) -> Exchange:
        """Exchange headers alone, after the last transfer: no later one tells of its mean."""
        yield from self.parity_check.exchange(True, parity)
        return torch.empty(0)

    def _settle(self, sent: Tensor, launch: Launch) -> None:
        if self.before.settled:
            self.read_ahead(sent)
            with turn_inside(self.before.gate, self._turn):
                self.codec.settle(sent, launch)
                self.before.settled_by(launch.round)

    def _committed(
        self,
        sent: Tensor,
        is_finite: Callable[[], bool],
        launch: Launch,
        parity: ParityResult,
        sideband: Sideband,
        measure: Callable[[Tensor], Tensor] | None,
        lay_out: Callable[[], Tensor],
    ) -> Exchange:
        is_finite_here = is_finite()
        self.before.begin(launch.round)
        yield from self.parity_check.exchange(is_finite_here, parity)
        self.before.met = launch.round
        if not parity.is_refused:
            self.before.keep(launch.round)
        with self.before.gate:  # what was sent before may now be written
            x = lay_out()
        differing: list[int] = []
        for attempt in range(1, ATTEMPTS + 1):
            average = self._average(x, launch, parity)
            mean = yield from with_sideband(average, sideband, measure, self._sideband_mean)
            with self._turn():
                mean_hash = self.parity_check.hash_of(mean)
            differing = yield from self._commit.exchange(mean_hash, sideband.values)
            if not differing:
                if not parity.is_refused:
                    self.parity_check.remember(launch.round, mean_hash)
                    self._settle(sent, launch)
                self.before.ended = launch.round
                return mean
            if not parity.is_refused:
                self.before.undo(launch.round)
            if attempt < ATTEMPTS:
                logger.warning(
                    "fragment %d, launch %d: %s came to another result than the others; nobody "
                    "applies it, and it is averaged again", self._fragment.id, launch.round,
                    ", ".join(f"cluster {id}" for id in differing),
                )  # fmt: skip
                x = lay_out()
        parity.uncommitted, parity.is_refused = differing, True
        self.before.ended = launch.round
        sideband.values.zero_()
        return x.zero_()

    def _average(self, x: Tensor, launch: Launch, parity: ParityResult) -> Exchange:
        if parity.is_refused:
            return x.zero_()
        return (yield from in_turn(self.codec.exchange(x, launch), self._turn))


def common_slots(channel: FragmentChannel) -> dict[str, Tensor]:
    """Return the codec's state that is the same in all clusters: all but residuals."""
    codec = channel.codec
    return {name: slot for name, slot in codec.slots.items() if name not in codec.errors}


def _probes_of(codec: Channel) -> Mapping[str, Tensor]:
    return getattr(codec, "probes", {})


def _carry(before: Channel, after: Channel) -> list[str]:
    """Copy state to a channel of the same fragment; return the names of what does not fit there.

    A residual of the means that a cluster encodes is of other elements where its position or the
    number of clusters is another, and is there at all only from some number of them on.
    """
    left, taken = dict(before.slots), after.slots
    errors_before, errors_after = before.errors, after.errors
    for name, slot in taken.items():
        if name not in left or slot.shape != left[name].shape:
            continue
        if _elements(errors_before.get(name)) == _elements(errors_after.get(name)):
            slot.copy_(left.pop(name))
    return sorted(left)


def _elements(error: CodingError | None) -> tuple[int, int] | None:
    return None if error is None else (error.start, error.stop)
