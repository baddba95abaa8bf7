"""The products that factors of a matrix are made of: on the host, or on an accelerator.

What a cluster sends may be rounded as its products round: its codes are what all average. What all
apply is the same bits wherever it is made: sums of products of whole numbers below 2^24, exact in
any order (factors.py), and two multiplications an element. So clusters, and ranks, may make theirs
in different places, as long as means travel in codes; those in fp32 stay on the host.

On an accelerator a matrix stays on the host, where it has come and where its mean is needed
(hashes, checkpoints): it passes over in pieces of rows, and factors come back. So it takes there
what two pieces do, and no kernel keeps training waiting for longer than one piece.

What a cluster keeps, M - P Q^T, is added to what it sends next, so it may not be rounded as
training lets its products be (TF32, a setting of the whole process, which is not changed beside
training): with less than fp32 it is made in fp64, which no setting touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from dsx.compress.factors import EXACT_RANK, product
from dsx.compress.owners import NUM_PROBES
from dsx.compress.pieces import IN_FP64, PIECE_NUMEL, rows_at_once
from dsx.core.buffers import Buffers
from dsx.core.side_stream import SideStream

_LARGEST_CODE = 127
_CHECKED = 256  # rows and columns
Work = Callable[[str, tuple[int, ...]], Tensor]  # as `Buffers.work`
_AS_FP32 = ("ieee", "none")  # "none": nothing was asked for


class Products(Protocol):
    """All tensors are fp32 on the host, a matrix `[m, n]`, and results are written to `out`."""

    def of_rows(self, right: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M R of `right` R^T `[k, n]`, as `[k, m]`."""
        ...

    def of_columns(self, left: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M^T L of `left` L^T `[k, m]`, as `[k, n]`."""
        ...

    def mean(self, p: Tensor, scales_p: Tensor, q: Tensor, scales_q: Tensor, out: Tensor) -> None:
        """Write P Q^T `[m, n]` of codes `[r, m]` and `[r, n]` and their scales by column."""
        ...

    def lost(self, matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Write M - P Q^T `[m, n]` of values `[r, m]` and `[r, n]`."""
        ...

    def orthonormal(self, mean: Tensor, out: Tensor) -> tuple[float, float]:
        """Write orthonormal directions `[r, m]` of `mean` `[r + probes, m]`.

        Returns the mean square of the probes, and of what those directions miss of them.
        """
        ...


class HostProducts:
    """On the calling thread."""

    def of_rows(self, right: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M R."""
        torch.mm(right, matrix.T, out=out)

    def of_columns(self, left: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M^T L."""
        torch.mm(left, matrix, out=out)

    def mean(self, p: Tensor, scales_p: Tensor, q: Tensor, scales_q: Tensor, out: Tensor) -> None:
        """Write P Q^T of codes."""
        product(p, q, out)
        out.mul_(scales_p.unsqueeze(1)).mul_(scales_q)

    def lost(self, matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Write M - P Q^T."""
        torch.mm(p.T, q, out=out)
        torch.sub(matrix, out, out=out)

    def orthonormal(self, mean: Tensor, out: Tensor) -> tuple[float, float]:
        """Write orthonormal directions, by Householder QR."""
        total, missed = _orthonormal(mean, out, Buffers().work)
        return float(total), float(missed)


class SideProducts:
    """On an accelerator, where a matrix passes through in pieces of rows."""

    def __init__(self, side: SideStream, piece_numel: int = PIECE_NUMEL) -> None:
        self._side = side
        self._work = side.buffers.work
        self._piece_numel = piece_numel

    def of_rows(self, right: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M R, piece by piece."""

        def call() -> None:
            there, rows = self._there("columns", right), self._work("rows", tuple(out.shape))
            for start, stop, piece in self._pieces(matrix):
                rows[:, start:stop].copy_(torch.mm(there, piece.T, out=self._part(out, piece)))
            out.copy_(rows, non_blocking=True)

        self._side.run(call)

    def of_columns(self, left: Tensor, matrix: Tensor, out: Tensor) -> None:
        """Write M^T L, summed over the pieces in their order."""

        def call() -> None:
            there, columns = self._there("rows", left), self._work("columns", tuple(out.shape))
            columns.zero_()
            for start, stop, piece in self._pieces(matrix):
                columns.addmm_(there[:, start:stop], piece)
            out.copy_(columns, non_blocking=True)

        self._side.run(call)

    def mean(self, p: Tensor, scales_p: Tensor, q: Tensor, scales_q: Tensor, out: Tensor) -> None:
        """Write P Q^T of codes, piece by piece."""

        def call() -> None:
            p_there, q_there = self._there("rows", p), self._there("columns", q)
            of_rows, of_columns = (
                self._there("scales p", scales_p),
                self._there("scales q", scales_q),
            )
            for start, stop in self._bounds(out):
                shape = stop - start, out.shape[1]
                piece, room = self._work("product", shape), self._work("piece", shape)
                product(p_there[:, start:stop], q_there, piece, room)
                piece.mul_(of_rows[start:stop].unsqueeze(1)).mul_(of_columns)
                out[start:stop].copy_(piece, non_blocking=True)

        self._side.run(call)

    def lost(self, matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Write M - P Q^T, piece by piece; in fp64 where fp32 would be rounded to less."""

        def call() -> None:
            p_there, q_there = self._there("rows", p), self._there("columns", q)
            if not products_are_fp32():
                self._lost_in_fp64(matrix, p_there, q_there, out)
                return
            for start, stop, piece in self._pieces(matrix):
                lost = self._work("product", tuple(piece.shape))
                torch.mm(p_there[:, start:stop].T, q_there, out=lost)
                torch.sub(piece, lost, out=lost)
                out[start:stop].copy_(lost, non_blocking=True)

        self._side.run(call)

    def _lost_in_fp64(self, matrix: Tensor, p: Tensor, q: Tensor, out: Tensor) -> None:
        """Write M - P Q^T, rounded once: smaller pieces, and as many rows of the factors a time."""
        n, rows = matrix.shape[1], self._rows(matrix, IN_FP64)
        lost, right = self._in_fp64("product", 2, rows, n)
        for start, stop, piece in self._pieces(matrix, IN_FP64):
            own = lost[: stop - start].copy_(piece)
            for first in range(0, q.shape[0], rows):
                p_rows, q_rows = p[first : first + rows, start:stop], q[first : first + rows]
                left = self._in_fp64("part", *p_rows.shape).copy_(p_rows)
                own.addmm_(left.T, right[: len(q_rows)].copy_(q_rows), alpha=-1)
            out[start:stop].copy_(piece.copy_(own), non_blocking=True)

    def orthonormal(self, mean: Tensor, out: Tensor) -> tuple[float, float]:
        """Write orthonormal directions, by the device's QR."""

        def call() -> Tensor:
            there = self._there("rows", mean)
            squares = torch.stack(_orthonormal(there, there[: out.shape[0]], self._work))
            out.copy_(there[: out.shape[0]], non_blocking=True)
            return torch.empty(2).copy_(squares, non_blocking=True)

        total, missed = self._side.run(call).tolist()
        return total, missed

    def _there(self, role: str, x: Tensor) -> Tensor:
        return self._work(role, tuple(x.shape)).copy_(x, non_blocking=True)

    def _part(self, out: Tensor, piece: Tensor) -> Tensor:
        return self._work("part", (out.shape[0], piece.shape[0]))

    def _in_fp64(self, role: str, *shape: int) -> Tensor:
        return self._work(role, (2 * prod(shape),)).view(torch.float64).view(shape)

    def _rows(self, matrix: Tensor, smaller: int = 1) -> int:
        m, n = matrix.shape
        return max(1, rows_at_once(m, n, self._piece_numel) // smaller)

    def _bounds(self, matrix: Tensor, smaller: int = 1) -> Iterator[tuple[int, int]]:
        m, rows = matrix.shape[0], self._rows(matrix, smaller)
        for start in range(0, m, rows):
            yield start, min(start + rows, m)

    def _pieces(self, matrix: Tensor, smaller: int = 1) -> Iterator[tuple[int, int, Tensor]]:
        for start, stop in self._bounds(matrix, smaller):
            yield start, stop, self._there("piece", matrix[start:stop])


def products_are_fp32() -> bool:
    """Return whether training lets products of fp32 be products of fp32, and no less, on CUDA.

    Asked anew each time, as each product asks; by the newer of torch's settings where it has that,
    which warns of the older ones, and refuses to read them where both were set.
    """
    precision: str | None = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if precision is None:
        return not torch.backends.cuda.matmul.allow_tf32
    return precision in _AS_FP32


def require_exact(side: SideStream) -> None:
    """Raise RuntimeError unless a device sums products of whole numbers as the host does.

    At the start of a run: with the largest codes, and as many of them as are summed at a time.
    """
    codes = torch.full((EXACT_RANK, _CHECKED), float(_LARGEST_CODE))
    codes[1::2, ::2] -= 1
    codes[::3, 1::4] *= -1
    expected = torch.empty(_CHECKED, _CHECKED)
    product(codes, codes, expected)

    def call() -> Tensor:
        there, found = codes.to(side.device), torch.zeros_like(expected, device=side.device)
        product(there, there, found)
        return found.to("cpu")

    if not torch.equal(side.run(call), expected):
        raise RuntimeError(
            f"coding.factors='accelerator': {side.device} does not sum products of whole numbers "
            "exactly, so clusters would apply other means; set it to 'host'"
        )


def _orthonormal(mean: Tensor, out: Tensor, work: Work) -> tuple[Tensor, Tensor]:
    """Write the directions to `out`, which may be the first rows of `mean`."""
    rank, m = out.shape
    probes, room = mean[rank:], work("product", (rank + NUM_PROBES, m))
    p, missed = room[:rank], room[rank:]
    triangle = work("part", (rank, rank))  # in other storage, by which QR tells Q from R
    torch.linalg.qr(mean[:rank].T, out=(p.T, triangle.T))
    total = torch.square(probes, out=missed).sum() / NUM_PROBES
    torch.sub(probes, torch.mm(probes @ p.T, p, out=missed), out=missed)
    out.copy_(p)
    return total, missed.square_().sum() / NUM_PROBES
