"""The contract between what is sent and who sends it, and the exact fp32 channel.

A compressor is a choice of the configuration; it opens one channel per fragment, which owns the
buffers and the state (residuals, warm starts) of that fragment on this rank, and runs the
exchanges of its transfers one after another, on whatever thread the transport uses. State lives
on the host, beside the buffers that travel.

Compressors are declarations that need no torch: they import the channels that they open, which
import no compressor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from dsx.compress.slices import SENT, Rounds, Sizes, exact_bytes, exact_rounds
from dsx.core.buffers import Opening
from dsx.core.exchange import Exchange
from dsx.core.membership import Seat
from dsx.core.registry import contract, register
from dsx.core.types import Fragment, Slot

if TYPE_CHECKING:
    from torch import Tensor

    from dsx.compress.error_feedback import Residual


@dataclass(frozen=True)
class Launch:
    """What a channel may need to know of a transfer: equal on every cluster.

    `round` counts the fragment's transfers from 1, `rank` is that of low-rank codecs, `most_rank`
    the most that a controller may ask for; None: no other than `rank`. Only plans need that one.
    """

    round: int
    rank: int | None = None
    most_rank: int | None = None


@dataclass(frozen=True)
class CodingError:
    """What coding lost of the elements start..stop of a fragment on the wire.

    Of what this cluster sends, or (`is_of_mean`) of the means that it encodes for all.
    """

    start: int
    stop: int
    residual: Residual
    is_of_mean: bool = False


class Channel(Protocol):
    """One fragment's way over the network, for one rank."""

    @property
    def slots(self) -> Mapping[str, Tensor]:
        """State that a checkpoint has to carry, by name; on the CPU, changed in place."""
        return {name: error.residual.stored for name, error in self.errors.items()}

    @property
    def errors(self) -> Mapping[str, CodingError]:
        """Return those of the slots that are residuals, with the elements they are of."""
        ...

    @property
    def spectrum(self) -> Tensor | None:
        """Return what the round just ended tells of the rank (see low_rank.py), if anything."""
        return None

    def exchange(self, x: Tensor, launch: Launch) -> Exchange:
        """Average `x`, fp32 `[numel]` on the CPU, in place; every cluster gets the same bits."""
        ...

    @property
    def settled(self) -> Collection[str]:
        """Return those of the slots that exchanges leave as they are: `settle` makes them anew."""
        return ()

    @property
    def probes(self) -> Mapping[str, Tensor]:
        """Return what is seen of an `x` before `take_in`, by name, for another exchange of it; the
        `round` it is of, int64 [1], 0 for none, is there, too.
        """
        return {}

    def take_in(self, x: Tensor, launch: Launch) -> None:
        """Add to `x`, in place, what those of the slots hold that are `settled`."""

    def settle(self, x: Tensor, launch: Launch) -> None:
        """Make the `settled` slots what the exchange of `x`, which has just ended, leaves: it is
        taken in, in place, and what its codes miss is kept.

        Made again later, the exchange is one of that `x`, with zeros in the slots.
        """

    def can_recode(self, launch: Launch) -> bool:
        """Whether what an exchange leaves in the slots follows from this cluster's `x` alone."""
        return not self.slots

    def recode(self, x: Tensor, launch: Launch) -> None:
        """Make the slots what the exchange of `x`, used up, would have left; where it can. Of those
        that are `settled` the codes, which `settle` asks for.
        """


class EncodingChannel(Channel, Protocol):
    """A channel that has been opened to encode at the launch."""

    def encode(self, x: Tensor, launch: Launch) -> None:
        """Make the codes that the exchange of `launch` then sends, whatever its `x` holds.

        `x`, in place, becomes what everybody decodes of them; residuals become what they lost.
        Called by the training thread, at times while an earlier launch is being exchanged, or by
        the transfer's, before its exchange.
        """
        ...

    def messages(self, launch: Launch) -> Mapping[str, Tensor]:
        """Return the codes of an encoded launch by name, uint8, where they lie: they may be read,
        or written back in place, to this channel or one of another membership of the same run,
        whose names and shapes are these; any `at_launch` rounds in a row lie apart.
        """
        ...


@contract("compression")
class Compressor(Protocol):
    """How pseudo-gradients travel; frozen, and all but `open` from numbers alone.

    To be derived from: what is not said otherwise is as of the simplest one. A plan asks for
    `traffic` and `state_bytes`, a run for `open`, whose channels do just that.
    """

    is_exact: ClassVar[bool] = False
    """Whether the mean is that of the fp32 values themselves."""
    needs_whole_matrices: ClassVar[bool] = False
    """Whether shards have to be put together before coding."""
    captures_spectrum: ClassVar[bool] = False
    """Whether its channels tell of the rank, by `spectrum`."""
    takes_turns: ClassVar[bool] = False
    """Whether a rank's fragments are coded one at a time: each in all of the work space."""
    encodes_at_launch: ClassVar[bool] = False
    """Whether what all others decode of a cluster can be known at the launch (`Opening`)."""

    @property
    def makes_factors(self) -> bool:
        """Whether it makes factors, which an accelerator can make to the same means."""
        return False

    @property
    def is_fine(self) -> bool:
        """Whether means have, but for some percent, the energy of those of the values."""
        return self.is_exact

    @property
    def needs_feedback(self) -> bool:
        """Whether most would never arrive if what is not sent were lost."""
        return False

    @property
    def usual_round(self) -> int:
        """Return the number of a round that sends what most do."""
        return 1

    def takes(self, slot: Slot) -> bool:
        """Whether a whole parameter is one of those that have to be put together."""
        return False

    def usual_bytes(self, slot: Slot, max_rank: int) -> int:
        """Return about what one of many clusters sends of a slot in a usual round, its part of the
        means included; `max_rank` as for `open`. What whole matrices are dealt to ranks by.
        """
        return 8 * slot.numel

    def validate(self) -> None:
        """Raise ValueError for values that cannot work."""

    @abstractmethod
    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return the channel of one fragment, with its buffers, for ranks up to `max_rank`.

        `opening` is given to those who take it, as those must who say `encodes_at_launch`.
        """
        ...

    @abstractmethod
    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return what each cluster sends and receives, exchange round by exchange round.

        At a rank that has not changed before; `shard` as in `Seat`.
        """
        ...

    def payload_bytes(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> list[int]:
        """Return the bytes that each cluster sends of a fragment, headers apart."""
        rounds = self.traffic(fragment, num_clusters, launch, shard)
        return rounds[:, :, SENT].sum(axis=0).tolist()

    def state_bytes(self, fragment: Fragment, num_clusters: int, max_rank: int) -> list[int]:
        """Return what the `slots` of each cluster's channel take: residuals, warm starts."""
        return [0] * num_clusters

    def before_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what copies of the slots take that exchanges change, by cluster.

        Those of what is sent are changed at the launch, where codes are made there.
        """
        return (
            [0] * num_clusters if at_launch else self.state_bytes(fragment, num_clusters, max_rank)
        )

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what each cluster's channel holds beside `slots`: codes, factors, work space."""
        return [0] * num_clusters

    def work_in_turn(
        self, fragment: Fragment, num_clusters: int, max_rank: int
    ) -> Mapping[str, Sizes]:
        """Return what a fragment needs, by role and cluster, of what all take turns with."""
        return {}

    def side_work(self, fragment: Fragment, max_rank: int) -> Mapping[str, int]:
        """Return the bytes that factors are made in on an accelerator, by role."""
        return {}

    def shared_work_bytes(self, fragment: Fragment) -> int:
        """Return what a fragment needs of the work space that all fragments of a rank share."""
        return 0


@register("compression", "dense")
@dataclass(frozen=True)
class Dense(Compressor):
    """Send the fp32 pseudo-gradient as it is: 4 bytes per element, no error."""

    is_exact = True

    def open(
        self, fragment: Fragment, seat: Seat, max_rank: int, opening: Opening | None = None
    ) -> Channel:
        """Return a channel that averages in fp32."""
        from dsx.compress.averaging import DenseChannel

        return DenseChannel(seat, opening or Opening())

    def buffer_bytes(
        self, fragment: Fragment, num_clusters: int, max_rank: int, at_launch: int = 0
    ) -> list[int]:
        """Return what the others' values take."""
        return exact_bytes(fragment.numel, num_clusters)

    def traffic(
        self, fragment: Fragment, num_clusters: int, launch: Launch, shard: int = 0
    ) -> Rounds:
        """Return those of an exact mean."""
        return exact_rounds(fragment.numel, num_clusters)
