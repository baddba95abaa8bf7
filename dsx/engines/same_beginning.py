"""Clusters that begin from a checkpoint of one synchronous run: all must have loaded the same.

What a checkpoint brings beside the weights is not sent between clusters: moments, schedules and
counters. So they are compared, to the bit, as digests of a few bytes, and the weights with them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.masters import Piece
from dsx.training.handle import Handle

_PLAIN = (bool, int, float, str, type(None))


def begin_alike(handle: Handle, loaded: Any, source: str) -> None:
    """Begin outer training from what every cluster has loaded. Collective over all clusters.

    Anchors are these masters. `loaded` is what else has to be equal, as JSON values. ValueError, in
    all clusters, if something is not.
    """
    beginning = handle.loop.beginning
    beginning.is_open = False
    for _ in beginning.taking(waits=True):
        pass
    told = handle.gather(loaded)
    if beginning.is_open or any(one != told[0] for one in told):
        wrong = "weights" if beginning.is_open else "optimizer states, schedules or counters"
        raise ValueError(
            f"the clusters have loaded different {wrong} from {source}: give every site a "
            "copy of the same files"
        )


def digest_states(
    groups: Iterable[Mapping[str, Any]],
    states: Iterable[tuple[str, Piece, Mapping[str, Any]]],
) -> str:
    """Return a digest of an optimizer's groups and states. Collective in the cluster.

    `states` are those of each piece of a parameter that this rank steps, by name.
    """
    digest = hashlib.sha256()
    for group in groups:
        digest.update(repr(plain_values(group)).encode())
    for name, piece, state in states:
        for key, value in state.items():
            digest.update(f"{name} {key}".encode())
            if not isinstance(value, Tensor):
                digest.update(repr(plain_values({key: value})).encode())
            elif value.numel() == piece.master.numel() > 1:
                _add(digest, replace(piece, master=value).view())  # without what pads a shard
            else:
                _add(digest, value)
    of_ranks = hashlib.sha256("".join(gather_objects(digest.hexdigest())).encode())
    return of_ranks.hexdigest()


def plain_values(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what is alike in all clusters where it is equal: no objects, no tensors."""
    lists = {k: v if isinstance(v, (list, tuple)) else [v] for k, v in values.items()}
    return [(k, vs) for k, vs in lists.items() if all(isinstance(v, _PLAIN) for v in vs)]


def _add(digest: Any, tensor: Tensor) -> None:
    for part in tensor.detach().reshape(-1).split(1 << 24):
        digest.update(part.cpu().contiguous().view(torch.uint8).numpy().data)
