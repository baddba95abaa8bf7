"""A run that begins from a checkpoint of plain Megatron: of one world, trained without dsx.

Megatron has loaded weights, optimizer states, schedule and counters in every cluster, and all of
that stays as it is. Outer training begins: anchors are these weights, its step is 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsx.engines.masters import Piece
from dsx.engines.same_beginning import begin_alike, digest_states, plain_values
from dsx.training.handle import Handle


def begin_from(handle: Handle, source: str | Path, counters: Mapping[str, Any]) -> None:
    """Begin outer training from what Megatron has loaded. Collective over all clusters.

    `counters` are plain values that have to be equal, too. ValueError, in all clusters, if they
    have loaded different checkpoints.
    """
    adapter: Any = handle.loop.adapter
    groups = [group for one in adapter.inner_optimizers for group in one.param_groups]
    digest = digest_states(groups, _states(adapter))
    begin_alike(handle, [digest, repr(plain_values(counters))], str(source))


def _states(adapter: Any) -> Iterator[tuple[str, Piece, Mapping[str, Any]]]:
    """Return this rank's pieces of parameters, by number, with the state of each."""
    pieces = [piece for place in adapter.places for _, piece in place.pieces()]
    for number, piece in enumerate(pieces):
        held = [
            one.state[piece.master] for one in adapter.inner_optimizers if piece.master in one.state
        ]
        yield str(number), piece, held[0] if held else {}
