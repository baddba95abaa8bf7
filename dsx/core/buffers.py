"""Where outer training takes its memory: buffers by purpose, and how many bytes each has given.

Everything that outer training holds from round to round is asked for here: outer state, what
travels, codes, factors, work space. So an `Allocator` knows what a rank has allocated, and a test
can hold the prediction (outer/memory.py) to it. Page-locked memory is registered page by page
(outer/pinned.py), for torch's own allocator rounds it up to powers of two; what is kept on disk is
mapped (outer/mapped.py).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from math import prod
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

if TYPE_CHECKING:  # what only plans is started without torch
    import torch
    from torch import Tensor

    from dsx.core.side_stream import SideStream

Pages = Callable[[int], "Tensor"]  # returns so many bytes: page-locked, or of a file; zeroed


class Buffers:
    """Gives the memory of one owner, on `device`, and knows how much that is.

    With `pages`, on the host and made of those. A dtype is named; fp32 unless said.
    """

    def __init__(self, device: torch.device | str = "cpu", pages: Pages | None = None) -> None:
        self._device = device
        self._pages = pages
        self._given = 0
        self._work: dict[tuple[str, torch.dtype], Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes given and held, work space included."""
        work = [*self._work.values()]  # at once: another thread may look
        return self._given + sum(t.numel() * t.element_size() for t in work)

    def zeros(self, *shape: int, dtype: str = "float32") -> Tensor:
        """Return a tensor of its own, for as long as the owner lives."""
        import torch

        kind: Any = getattr(torch, dtype)
        self._given += prod(shape) * kind.itemsize
        if self._pages is not None:
            return self._pages(prod(shape) * kind.itemsize).view(kind).view(shape)
        return torch.zeros(shape, dtype=kind, device=self._device)

    def work(self, role: str, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
        """Return work space, contents undefined: the same memory for a role, until asked again.

        As large as was ever asked for, and no part of `zeros`. For one thread at a time.
        """
        import torch

        dtype = dtype or torch.float32
        numel = prod(shape)
        buffer = self._work.get((role, dtype))
        if buffer is None or buffer.numel() < numel:
            self._work.pop((role, dtype), None)  # the old one goes before the new one comes
            buffer = torch.empty(numel, dtype=dtype, device=self._device)
            self._work[role, dtype] = buffer
        return buffer[:numel].view(shape)


class Overlay(Buffers):
    """Gives parts of `memory`, uint8, one behind another, and work space of the `buffers` it is of.

    Who holds another overlay of that memory uses it at other times.
    """

    def __init__(self, memory: Tensor, buffers: Buffers) -> None:
        super().__init__()
        self._memory, self._at = memory, 0
        self.work = buffers.work

    def zeros(self, *shape: int, dtype: str = "float32") -> Tensor:
        """Return the next part of the memory, contents undefined."""
        import torch

        kind: Any = getattr(torch, dtype)
        start, self._at = self._at, self._at + prod(shape) * kind.itemsize
        assert self._at <= self._memory.numel(), "more is laid over memory than there is"
        return self._memory[start : self._at].view(kind).view(shape)


def one_behind_another(memory: Tensor, sizes: Iterable[int]) -> list[Tensor]:
    """Return parts of a vector, of so many elements each."""
    ends = accumulate(sizes, initial=0)
    return [memory[start:stop] for start, stop in pairwise(ends)]


class SharedWork:
    """Work space that the threads of a rank take turns with."""

    def __init__(self, buffers: Buffers | None = None) -> None:
        self._buffers = buffers or Buffers()
        self._turn = Lock()

    @contextmanager
    def taken(self, numel: int) -> Generator[Tensor, None, None]:
        """Hold fp32 `[numel]`, contents undefined."""
        with self._turn:
            yield self._buffers.work("shared", (numel,))


class Turns:
    """Work space that a rank's exchanges take turns with: who holds `lock` works in `buffers`.

    What lies there lasts as long as that: never over a message, which others are waited for.
    """

    def __init__(self, buffers: Buffers | None = None) -> None:
        self.buffers = buffers or Buffers()
        self.lock = Lock()


@dataclass(frozen=True)
class Opening:
    """What a channel is opened with: where all that it allocates comes from.

    `work` and `turns` are shared by a rank's channels; who holds both has taken `work` first.
    `at_launch`: so many launches may lie encoded, not yet
    exchanged, and it is an `EncodingChannel`, whose encoder works in `encoding`, on another thread.
    `side` is an accelerator's stream to compute on, where factors are made there.
    Its state, which a checkpoint carries, is in `state`, and copies of that in `before`; where they
    are on a disk, `read_ahead` returns once what it is given is in memory.
    """

    buffers: Buffers = field(default_factory=Buffers)
    state: Buffers = field(default_factory=Buffers)
    work: SharedWork = field(default_factory=SharedWork)
    turns: Turns = field(default_factory=Turns)
    at_launch: int = 0
    encoding: Buffers = field(default_factory=Buffers)
    before: Buffers = field(default_factory=Buffers)
    side: SideStream | None = None
    read_ahead: Callable[[Iterable[Tensor]], object] = lambda tensors: None


class Allocator:
    """Opens `Buffers` for a rank's purposes, and sums up what those that are in use have given.

    Outer state lives on `device`, or, with `disk`, in files; `pin` gives page-locked memory.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        pin: Pages | None = None,
        disk: Pages | None = None,
    ) -> None:
        self._device = device
        self._pin = pin
        self._disk = disk
        self._open: dict[str, WeakSet[Buffers]] = {}
        self._lock = Lock()  # `given` is for any thread

    def buffers(self, purpose: str) -> Buffers:
        """Return buffers where outer state lives."""
        return self.work_space(purpose) if self._disk is None else self.seldom(purpose)

    def work_space(self, purpose: str) -> Buffers:
        """Return buffers where outer steps are taken, on the host page-locked."""
        pin = self._pin if str(self._device) == "cpu" else None
        return self.adopt(purpose, Buffers(self._device, pin))

    def on_host(self, purpose: str, is_pinned: bool = False) -> Buffers:
        """Return buffers on the host, wherever outer state lives."""
        return self.adopt(purpose, Buffers("cpu", self._pin if is_pinned else None))

    def seldom(self, purpose: str, is_pinned: bool = False) -> Buffers:
        """Return buffers for what is touched once a round: on disk, or else `on_host`."""
        if self._disk is None:
            return self.on_host(purpose, is_pinned)
        return self.adopt(purpose, Buffers("cpu", self._disk))

    def adopt(self, purpose: str, buffers: Buffers) -> Buffers:
        """Count buffers that were opened elsewhere, too, and return them."""
        with self._lock:
            self._open.setdefault(purpose, WeakSet()).add(buffers)
        return buffers

    @property
    def given(self) -> dict[str, int]:
        """Bytes held, by purpose."""
        with self._lock:
            return {purpose: sum(b.num_bytes for b in open) for purpose, open in self._open.items()}
