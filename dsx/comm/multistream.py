"""How one message is cut for several TCP connections: as bytes, into nearly equal pieces.

One connection carries at most its buffers per round trip, and shrinks its window with every loss,
so a long line is filled by several. (gloo sets SO_SNDBUF to the size of the largest message so
far, which ends the kernel's own tuning, and net.core.wmem_max caps it: 208 KiB where Linux has its
default.) Both ends cut by the size alone and so agree without a word; the bytes that arrive are
those that were sent, whatever the number of connections.

Each connection is a socket, and kernel buffers, on either side: fragments x streams x peers of
them per rank. Their number counts against the limit on open files and in firewalls' tables, and
they connect one after another, some 8 round trips for each stream of a fragment.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

MAX_STREAMS = 64
LEAST_PIECE_BYTES = 16 * 1024  # what is shorter fits the first windows of one connection


def piece_bounds(num_bytes: int, num_streams: int) -> list[tuple[int, int]]:
    """Return `(start, stop)` of each piece: `num_streams` of them, or as many as have the least.

    Lengths differ by one byte at most; nothing is one empty piece.
    """
    count = max(1, min(num_streams, num_bytes // LEAST_PIECE_BYTES))
    cuts = [num_bytes * k // count for k in range(count + 1)]
    return list(zip(cuts, cuts[1:], strict=False))


def pieces(tensor: Tensor, num_streams: int) -> list[Tensor]:
    """Return views of a contiguous tensor's bytes, the k-th for the k-th connection."""
    import torch

    bounds = piece_bounds(tensor.numel() * tensor.element_size(), num_streams)
    if len(bounds) == 1:
        return [tensor]
    flat = tensor.view(-1).view(torch.uint8)
    return [flat[start:stop] for start, stop in bounds]
