"""Low rank on the device: what all apply is the host's to the bit, what it takes, who waits."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from dsx.bench.gpu.table import Outcome, Row
from dsx.compress.factor_products import HostProducts, Products, SideProducts, require_exact
from dsx.compress.owners import NUM_PROBES
from dsx.core.side_stream import SideStream
from dsx.core.units import format_bytes

_HELD_CYCLES = 2_000_000_000  # about a second


class Round:
    """The products of a round with feedback, of one matrix `[m, n]` on the host."""

    def __init__(self, m: int, n: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(0)
        pin = torch.cuda.is_available()
        self.matrix, self.mean = (torch.empty(m, n, pin_memory=pin) for _ in range(2))
        self.matrix.normal_(generator=generator)
        self._right = torch.randn(rank, n, generator=generator)
        p, q = torch.empty(rank + NUM_PROBES, m), torch.empty(rank, n)
        self._p, self._q, self._rank = p.normal_(generator=generator), q, rank
        self._codes = [
            torch.randint(-127, 128, (rank, length), generator=generator).float()
            for length in (m, n)
        ]
        self._scales = [torch.rand(length, generator=generator) for length in (m, n)]

    def take(self, products: Products) -> None:
        """Make P, its directions and Q, and what they miss of the matrix."""
        p = self._p[: self._rank]
        products.of_rows(self._right, self.matrix, p)
        products.orthonormal(self._p, p)
        products.of_columns(p, self.matrix, self._q)
        products.lost(self.matrix, p, self._q, self.mean)

    def apply(self, products: Products) -> Tensor:
        """Return the mean of the same codes."""
        products.mean(self._codes[0], self._scales[0], self._codes[1], self._scales[1], self.mean)
        return self.mean


def factors(m: int = 16384, n: int = 8192, rank: int = 256, repeats: int = 3) -> list[Row]:
    """Check low rank on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    side = SideStream(device)
    rows = on(side, m, n, rank, repeats)
    of_one = Round(m, n, rank)
    return [*rows, _beside(side, of_one)]


def on(side: SideStream, m: int, n: int, rank: int, repeats: int) -> list[Row]:
    """Compare what is applied with the host's, and time both."""
    require_exact(side)
    of_one, there, here = Round(m, n, rank), SideProducts(side), HostProducts()
    equal = torch.equal(of_one.apply(there).clone(), of_one.apply(here))
    what = f"rank {rank} of {m:,} x {n:,}"
    rows = [
        Row(
            "low rank on the device", f"{what}, means of the same codes", "the host's bits",
            "equal" if equal else "they differ", "ok" if equal else "failed",
        )
    ]  # fmt: skip
    timed: list[tuple[str, Callable[[], object]]] = [
        ("P, Q and residual", lambda: of_one.take(there)),
        ("mean", lambda: of_one.apply(there)),
        ("P, Q and residual on the host", lambda: of_one.take(here)),
    ]
    for name, call in timed:
        call()
        seconds = min(_seconds(call) for _ in range(repeats))
        seen = f"{1e9 * seconds / (m * n):.3g} ns an element"
        rows.append(Row("low rank on the device", f"{what}, {name}", "", seen, "seen"))
    told = f"{format_bytes(side.buffers.num_bytes, binary=True)} of work space"
    rows.append(Row("low rank on the device", f"{what}, memory", "", told, "seen"))
    return rows


def _beside(side: SideStream, of_one: Round) -> Row:
    """Hold up training's stream, and see whether a round ends meanwhile."""
    of_one.take(SideProducts(side))
    torch.cuda.synchronize()
    held = torch.cuda.Event()
    sleep: Callable[[int], None] = partial(torch.cuda._sleep)  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue, reportUnknownArgumentType, reportUnknownMemberType]
    sleep(_HELD_CYCLES)
    held.record()
    of_one.take(SideProducts(side))
    is_beside = not held.query()
    torch.cuda.synchronize()
    outcome: Outcome = "ok" if is_beside else "failed"
    seen = "it did" if is_beside else "it waited for training's stream, or took longer"
    wanted = "ends while training's stream is held up"
    return Row("low rank on the device", "a round beside training", wanted, seen, outcome)


def _seconds(call: Callable[[], object]) -> float:
    since = time.perf_counter()
    call()
    return time.perf_counter() - since
