"""Where outer state lives: flat buffers per fragment, allocated once, fp32 but for slots in bf16.

Per fragment: the anchor (if the method keeps one), the slots of the outer optimizer, the delay
policy and the staleness penalty, its channel to the other clusters with the codec's state (and what
that was before the attempt under way), and what the transfers that may be under way at a time take
turns with (arenas.py): on the host (pinned when the state is on an accelerator) vectors for what is
sent and what travels, sidebands of both, and where the masters are what the delay policy keeps.
With a folder among the `resources`, in files there: all but what travels, codes, and what is
worked in.
Shared by all fragments: scratch vectors (work_space.py), allocated when first used.
Nothing is allocated after the first round, but what is lent to launches (arenas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from torch import Tensor

from dsx.core.buffers import Allocator, Buffers, Opening, SharedWork, Turns
from dsx.core.engine import EngineAdapter
from dsx.core.membership import Seat
from dsx.core.types import Fragment
from dsx.method.method import Method
from dsx.method.outer_optimizer import slot_dtypes
from dsx.outer.arenas import Arenas, TransferBuffers
from dsx.outer.channel import FragmentChannel
from dsx.outer.mapped import MappedMemory, read_ahead
from dsx.outer.passing_on import passes_on
from dsx.outer.pinned import PinnedMemory
from dsx.outer.resources import Resources
from dsx.outer.sideband import Sideband, SidebandShape, sideband_shape
from dsx.outer.work_space import work_lengths


@dataclass
class Slots:
    """A fragment's named buffers, by who owns them."""

    outer: dict[str, Tensor]
    delay: dict[str, Tensor]
    staleness: dict[str, Tensor]

    def named(self) -> dict[str, Tensor]:
        """Return all of them under names that tell the owner, for checkpoints."""
        groups = {"outer": self.outer, "delay": self.delay, "staleness": self.staleness}
        return {f"{owner}.{n}": t for owner, slots in groups.items() for n, t in slots.items()}


class StateStore:
    """The buffers of one rank; tensors are fp32 `[numel]` of their fragment unless said, slots
    of the outer rule as its `state_dtype` says.

    `on_the_wire` are the fragments as they travel, where that differs (whole_matrices.py).
    """

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        num_tensors: Sequence[int],
        on_the_wire: Sequence[Fragment],
        seat: Seat,
        resources: Resources | None = None,
    ) -> None:
        self.resources = resources = resources or Resources()
        fragments = adapter.fragments
        self.device = adapter.device
        self.is_on_disk = resources.folder is not None
        self.allocator = _allocator(adapter, resources)
        self._numel = [f.numel for f in fragments]
        has_anchor = method.outer_optimizer.keeps_anchor
        self._anchors = self.allocator.buffers("anchor")
        self.anchor = [self._anchors.zeros(n if has_anchor else 0) for n in self._numel]
        self._of_policies = {
            name: self.allocator.buffers(name) for name in ("outer_optimizer", "delay", "staleness")
        }
        self.slots = [
            _make_slots(method, f, count, self._of_policies)
            for f, count in zip(fragments, num_tensors, strict=True)
        ]
        self._shapes = _sideband_shapes(method, fragments, num_tensors, seat)
        self._wire_numel = [wire.numel for wire in on_the_wire]
        self._at_launch = method.max_in_flight if method.encodes_at_launch else 0
        self.passes_on = passes_on(method, adapter.device.type != "cpu", self.is_on_disk)
        self._travelling = self.allocator.on_host("transfers", is_pinned=True)
        self._attempts = self.allocator.seldom("attempts", is_pinned=True)
        kept = None if method.keeps is None else self._of_policies["delay"]
        places = self._travelling, self._attempts, kept
        self._buffers = [
            self._new_buffers(f.id, *places, method.max_in_flight, self.passes_on)
            for f in fragments
        ]
        self._shared_work = SharedWork(self.allocator.on_host("channels"))
        self._turns = Turns(self.allocator.on_host("channels"))
        self.channels = [
            FragmentChannel(
                method.compression,
                f,
                method.control.largest_rank,
                seat,
                self._opening,
                method.max_norm_ratio,
                resources.turn,
            )  # fmt: skip
            for f in on_the_wire
        ]
        # told of a fragment whose anchor, and the outer optimizer's buffers, are about to change
        self.before_write: Callable[[int], object] = lambda fragment: None
        self._reopening = Lock()  # one channel at a time
        self._work_lengths = work_lengths(
            method, fragments, adapter.device.type != "cpu", self.is_on_disk
        )
        self._scratch: dict[str, Tensor] = {}
        self._work_space = self.allocator.work_space("work_space")

    def _opening(self) -> Opening:
        buffers, encoding = (self.allocator.on_host("channels") for _ in range(2))
        state, before = (self.allocator.seldom(name) for name in ("codec", "attempts"))
        work, turns = self._shared_work, self._turns
        at_launch, side = self._at_launch, self.resources.side
        more = (read_ahead,) if self.is_on_disk else ()
        return Opening(buffers, state, work, turns, at_launch, encoding, before, side, *more)

    def _new_buffers(
        self,
        fragment: int,
        travelling: Buffers,
        attempts: Buffers,
        kept: Buffers | None,
        count: int,
        passes_on: bool = False,
    ) -> Arenas:
        numel, shape = self._wire_numel[fragment], self._shapes[fragment]
        vectors = [travelling.zeros(numel) for _ in range(count)]
        more = 0 if self._at_launch or passes_on else count if self.is_on_disk else 1
        others = [attempts.zeros(numel) for _ in range(more)]
        sidebands: list[tuple[Sideband, Sideband, Tensor | None]] = []
        for _ in range(count):
            sideband, posted = (
                Sideband(shape, new.zeros(shape.numel)) for new in (travelling, attempts)
            )
            of_policy = None if kept is None else kept.zeros(self._numel[fragment])
            sidebands.append((sideband, posted, of_policy))
        if self.is_on_disk and not self._at_launch:
            return Arenas(sidebands, others, vectors)
        return Arenas(sidebands, [*vectors, *others], None, bool(self._at_launch), passes_on)

    def reopen(self, seat: Seat, fragment: int | None = None) -> None:
        """Go on under another membership, with one fragment, or all; no exchange of it is under
        way. Any thread.
        """
        channels = self.channels if fragment is None else self.channels[fragment : fragment + 1]
        for channel in channels:
            if channel.seat.membership != seat.membership:
                with self._reopening, channel.gate:
                    channel.open(seat.of_shard(channel.seat.shard))

    def more_buffers(self, fragment: int, round: int) -> TransferBuffers:
        """Return buffers beyond those that are taken in turn, for as long as they are held."""
        new = Buffers()
        more = self._new_buffers(fragment, new, new, None, 1).take(round)
        assert more is not None
        return more

    def take_buffers(self, fragment: int, round: int, sends: bool = True) -> TransferBuffers:
        """Return buffers of a fragment that are free, for a launch, and mark them taken.

        `sends`: with a vector for what is sent.
        """
        taken = self._buffers[fragment].take(round, sends)
        assert taken, f"fragment {fragment} has more transfers under way than its policy said"
        return taken

    def is_sent(self, fragment: int) -> bool:
        """Whether this rank has anything of a fragment, as it lies or as it travels."""
        return self._numel[fragment] + self._wire_numel[fragment] > 0

    def numel(self, fragment: int) -> int:
        """Return how many elements of a fragment this rank has."""
        return self._numel[fragment]

    def wire_numel(self, fragment: int) -> int:
        """Return how many elements of a fragment this rank sends."""
        return self._wire_numel[fragment]

    def free_buffers(self) -> None:
        """Take all buffers back: nothing is under way any more."""
        for of_fragment in self._buffers:
            of_fragment.free()

    def scratch(self, purpose: str, numel: int) -> Tensor:
        """Return the first `numel` elements of the shared work vector for a purpose."""
        length = max(numel, self._work_lengths.get(purpose, 0))
        found = self._scratch.get(purpose)
        if found is None or found.numel() < numel:
            found = self._scratch[purpose] = self._work_space.zeros(length)
        return found[:numel]

    def whole(self, fragment: int, purpose: str) -> Tensor:
        """Return a shared work vector, cut to the fragment's length."""
        return self.scratch(purpose, self._numel[fragment])

    def named_state(self, fragment: int) -> Mapping[str, Tensor]:
        """Return what a checkpoint holds of a fragment beside its transfers, by name."""
        named = {**self.slots[fragment].named(), **self.channels[fragment].slots}
        if self.anchor[fragment].numel():
            named["anchor"] = self.anchor[fragment]
        return named

    def sideband_numel(self, fragment: int) -> int:
        """Return how many numbers travel beside each transfer of a fragment."""
        return self._shapes[fragment].numel


def _allocator(adapter: EngineAdapter, resources: Resources) -> Allocator:
    pin = PinnedMemory() if adapter.pins_host_memory else None
    disk = None if resources.folder is None else MappedMemory(resources.folder)
    allocator = Allocator(adapter.device, pin, disk)
    if resources.side is not None:
        allocator.adopt("factors", resources.side.buffers)
    return allocator


def _sideband_shapes(
    method: Method, fragments: Sequence[Fragment], num_tensors: Sequence[int], seat: Seat
) -> list[SidebandShape]:
    places = len(seat.membership.places)
    pairs = zip(fragments, num_tensors, strict=True)
    return [sideband_shape(method, fragment, count, places) for fragment, count in pairs]


def _make_slots(
    method: Method, fragment: Fragment, num_tensors: int, new: Mapping[str, Buffers]
) -> Slots:
    numel = fragment.numel
    outer, delay = method.outer_optimizer, method.delay
    staleness = {
        name: new["staleness"].zeros(count)
        for name, count in method.staleness.slots(fragment, num_tensors).items()
    }
    if method.keeps_round_start:
        staleness["start"] = new["staleness"].zeros(numel)
    of_delay = slot_dtypes(outer, delay.slots(outer.slots))
    of_outer = slot_dtypes(outer, outer.slots)
    return Slots(
        outer={n: new["outer_optimizer"].zeros(numel, dtype=d) for n, d in of_outer.items()},
        delay={name: new["delay"].zeros(numel, dtype=dtype) for name, dtype in of_delay.items()},
        staleness=staleness,
    )
