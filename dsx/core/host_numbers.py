"""Numbers that an accelerator is still computing, brought to the host without waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class HostNumbers:
    """A record whose tensors, 0-dim, are copied behind what their device has been given so far.

    `item()` of a tensor on an accelerator waits for all that has been given to it, a whole step
    maybe; here the copies of those on CUDA are one, into page-locked memory, with an event.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._record = dict(record)
        self._names = [name for name, value in record.items() if getattr(value, "is_cuda", False)]
        self._copied: Any = None
        if self._names:
            import torch

            values = torch.stack([record[name].detach().double() for name in self._names])
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(values.device))

    @property
    def are_there(self) -> bool:
        """Whether `read` does not wait."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> dict[str, Any]:
        """Return the record with numbers in the place of tensors; waits for those of a device."""
        found = dict(self._record)
        if self._copied is not None:
            self._copied.synchronize()
            found.update(zip(self._names, self._values.tolist(), strict=True))
        return {k: v.item() if hasattr(v, "item") else v for k, v in found.items()}
