"""What a fragment's channel was before an attempt: copies, taken on the transfer's thread.

An exchange works on the channel's state in place. What it was before is copied once the headers
have been exchanged, ahead of the first code: an attempt that does not end is so undone by copying
back, and made again from the same bits. The copies are those of the attempt coded last, and stay
until the headers of the next one have told that every cluster has ended it.

Residuals that are `settled` are not copied: exchanges leave them alone. Once an attempt has ended,
what was contributed takes them in, and they become what its codes have lost. So it is made again
from that sum, with nothing to add.

Who looks at it for a checkpoint holds the `gate`, but not while writing. Meanwhile exchanges go on,
but neither these copies nor the state of a channel that has ended its attempt change.
"""

from __future__ import annotations

from collections.abc import Mapping
from threading import Lock
from types import MappingProxyType

from torch import Tensor

from dsx.core.buffers import Buffers


class StateBefore:
    """The state of one fragment's channel before its attempts; rounds count from 1.

    `slots` are those that exchanges change, in place, and `memory` is the parity check's; those of
    `settled` change when an attempt has ended.
    """

    def __init__(
        self,
        slots: Mapping[str, Tensor],
        memory: Tensor,
        buffers: Buffers | None = None,
        settled: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        self._buffers = new = buffers or Buffers()
        self.gate = Lock()
        self.slots, self._memory, self.settled = slots, memory, settled
        self._copies = {
            name: new.zeros(*slot.shape, dtype=str(slot.dtype).removeprefix("torch."))
            for name, slot in slots.items()
        }
        self._memories: dict[int, Tensor] = {}  # of the last two rounds begun
        self._first = 1  # the first round whose state of before is known
        self._begun = self._coded = 0
        self._settled = 0  # the last round that was
        self.met = 0  # the last round whose headers have come from all
        self.ended = 0  # the last round whose result all hold

    def begin(self, round: int) -> None:
        """Keep what the parity check remembers: headers are about to be exchanged."""
        with self.gate:
            self._memories = {r: m for r, m in self._memories.items() if r == round - 1}
            self._memories[round] = self._memory.clone()
            self._begun = round

    def keep(self, round: int) -> None:
        """Copy the state: coding is about to begin."""
        with self.gate:
            for name, copy in self._copies.items():
                copy.copy_(self.slots[name])
            self._coded = round

    def settled_by(self, round: int) -> None:
        """Note that what is settled, and the contribution, are those of after a round, which has
        ended. The gate must be held, since before they were changed.
        """
        self._settled = round

    def is_settled(self, round: int) -> bool:
        """Whether the contribution of a round has taken in what was lost before it."""
        return bool(self.settled) and self._settled == round

    def undo(self, round: int) -> None:
        """Make the state what it was when it was kept for a round whose attempt came to nothing."""
        with self.gate:
            assert self._coded == round, f"the state before round {round} was not kept"
            for name, copy in self._copies.items():
                self.slots[name].copy_(copy)

    def of(self, round: int) -> dict[str, Tensor] | None:
        """Return the state before a round, None if it is not known; not to be changed.

        Without what is settled. The gate must be held, and all rounds before this one must have
        ended.
        """
        if round < self._first or self._coded > round:
            return None
        memory = self._memories.get(round) if round <= self._begun else self._memory.clone()
        if memory is None:
            return None
        slots = self._copies if self._coded == round else self.slots
        return {**slots, "parity_check.memory": memory}

    def has_coded(self, round: int) -> bool:
        """Whether this is the round that was coded last: the copies are of before it."""
        return self._coded == round

    def put_back(self, round: int) -> None:
        """Make the channel's state that of before a round; none must be running.

        What has been coded ahead of its exchange stays.
        """
        with self.gate:
            before = self.of(round)
            assert before is not None, f"the state before round {round} is not known"
            for name, slot in (*self.slots.items(), ("parity_check.memory", self._memory)):
                slot.copy_(before[name])
            for slot in self.settled.values() if self._settled >= round else ():
                slot.zero_()  # the contribution has it
            self._settled = 0
            self._memories.clear()
            self._begun = self._coded = self.ended = round - 1
            self._first = round

    def restored(
        self,
        next_round: int,
        earlier: Mapping[str, Tensor] | None = None,
        is_settled: bool = False,
    ) -> None:
        """Begin anew after a checkpoint: the channel's state is that of before `next_round`.

        `earlier` is that of before the round before it, if it is known; `is_settled` is of that.
        """
        with self.gate:
            self._memories.clear()
            self._settled = next_round - 1 if is_settled else 0
            self._begun = self._coded = self.met = self.ended = next_round - 1
            self._first = next_round
            if earlier is not None:
                for name, copy in self._copies.items():
                    copy.copy_(earlier[name])
                self._memories[next_round - 1] = earlier["parity_check.memory"].clone()
                self._first = next_round - 1
