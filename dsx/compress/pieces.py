"""How a matrix passes through an accelerator that makes its factors: in pieces of rows."""

from __future__ import annotations

from dsx.compress.owners import NUM_PROBES

PIECE_NUMEL = 2**24  # of a matrix at a time: 64 MiB; a row at least
LOST_NUMEL = 2**26  # of what factors miss of a matrix, made anew at a time: 256 MiB; a row at least
IN_FP64 = 4  # pieces so many times smaller take the same memory, with as many rows of a factor


def rows_at_once(m: int, n: int, piece_numel: int = PIECE_NUMEL) -> int:
    """Return the rows of a piece of a matrix `[m, n]`."""
    return min(m, max(1, piece_numel // n))


def side_work(m: int, n: int, rank: int) -> dict[str, int]:
    """Return the bytes that the matrix `[m, n]` and its factors work in there, by role.

    What libraries work in is not among them.
    """
    rows, most = rows_at_once(m, n), max(rank, NUM_PROBES)
    return {
        "piece": 4 * rows * n, "part": 4 * max(most * rows, rank * rank),
        "product": 4 * max(rows * n, IN_FP64 * n, (rank + NUM_PROBES) * m),
        "rows": 4 * (rank + NUM_PROBES) * m, "columns": 4 * most * n,
        "scales p": 4 * m, "scales q": 4 * n,
    }  # fmt: skip
