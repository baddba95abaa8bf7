"""What Lightning writes as one file of a cluster's first rank: now, or beside training from copies.

Lightning's strategy writes it, with whatever CheckpointIO the Trainer has.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


class OwnFile:
    """A checkpoint of Lightning's, a part of a save (training/beside.py)."""

    def __init__(
        self, checkpoint: Mapping[str, Any], write: Callable[[Any], object], is_writer: bool
    ) -> None:
        """`write` is given what is to be written, on every rank; `is_writer` alone keeps it."""
        self._checkpoint: Any = checkpoint
        self._write, self._is_writer = write, is_writer

    def detach(self) -> None:
        """Copy all of it to the host: training is about to go on."""
        self._checkpoint = copied(self._checkpoint) if self._is_writer else {}

    def release(self, fragment: int) -> None:
        """Nothing to do: what is held is a copy."""

    def give_up(self) -> None:
        """Nothing to do: none is written before `write`."""

    def write(self) -> None:
        """Return once it is written."""
        checkpoint, self._checkpoint = self._checkpoint, {}
        self._write(checkpoint)


def copied(value: Any) -> Any:
    """Return copies, tensors on the host; of those that share memory as a whole, one."""
    return _copied(value, {})


def _copied(value: Any, known: dict[Any, Tensor]) -> Any:
    if isinstance(value, Tensor):
        own = value.detach()
        place = own.data_ptr(), own.shape, own.stride(), own.dtype, own.device
        if own.numel() == 0 or type(own) is not Tensor:
            return copy.deepcopy(own)
        if place not in known:
            known[place] = torch.empty_like(own, device="cpu").copy_(own)
        return known[place]
    if type(value) in (list, tuple):
        return type(value)([_copied(one, known) for one in value])
    if isinstance(value, dict) and type(value).__name__ in ("dict", "OrderedDict"):
        made = type(value)((key, _copied(one, known)) for key, one in value.items())
        if more := getattr(value, "__dict__", None):  # `_metadata`: the versions of modules
            vars(made).update(more)
        return made
    return copy.deepcopy(value)
