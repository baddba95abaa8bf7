"""Where outer state lives: flat fp32 buffers per fragment, allocated once.

Per fragment: the anchor, the outer optimizer's slots, and one wire buffer for the transfer in
flight (on the CPU, pinned when the state is on an accelerator). Shared by all fragments: two
scratch vectors as long as the largest one. Nothing is allocated after construction.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dsx.types import Fragment


class StateStore:
    """The buffers of one rank; every tensor is fp32 `[numel]` of its fragment."""

    def __init__(
        self, fragments: Sequence[Fragment], slots: Sequence[str], device: torch.device
    ) -> None:
        self.device = device
        self._numel = [f.numel for f in fragments]
        self.anchor = [torch.zeros(n, device=device) for n in self._numel]
        self.slots = [{s: torch.zeros(n, device=device) for s in slots} for n in self._numel]
        pinned = device.type == "cuda"
        self._wire = [torch.zeros(n, pin_memory=pinned) for n in self._numel]
        longest = max(self._numel, default=0)
        self._scratch = [torch.zeros(longest, device=device) for _ in range(2)]

    def wire(self, fragment: int) -> Tensor:
        """Return the CPU buffer that travels; it belongs to the transfer until that is applied."""
        return self._wire[fragment]

    def scratch(self, fragment: int, index: int) -> Tensor:
        """Return one of the two shared work vectors, cut to the fragment's length."""
        return self._scratch[index][: self._numel[fragment]]

    @property
    def num_bytes(self) -> int:
        """Bytes held in total, scratch and wire buffers included."""
        tensors = [*self.anchor, *self._wire, *self._scratch]
        tensors += [slot for slots in self.slots for slot in slots.values()]
        return sum(t.numel() * t.element_size() for t in tensors)
