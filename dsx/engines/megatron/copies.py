"""Copies of the embedding on a later stage, by the first (tied_weights.py).

They are the head of the last stage, or what predicts further tokens there. What tensor-parallel
ranks hold alike is in engines/copies.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from dsx.engines.cluster_collectives import gather_objects, new_groups
from dsx.engines.megatron.parameters import EMBEDDING, Coordinates, Parameter
from dsx.engines.tied_weights import TiedWeight


def find_tied_weights(parameters: Sequence[Parameter], place: Coordinates) -> list[TiedWeight]:
    """Return the tied embedding, where this rank holds it. Collective in the cluster.

    It makes a process group for each tensor-parallel rank: of the first stage and that of the copy.
    """
    holds = any(parameter.is_tied_copy for parameter in parameters)
    everyone = gather_objects((place, holds))
    if not any(holds for _, holds in everyone):
        return []
    found: list[TiedWeight] = []
    for slice_number in range(place.tensor[1]):
        ranks = [
            rank
            for rank, (other, is_copy) in enumerate(everyone)
            if other.tensor[0] == slice_number and (other.pipeline[0] == 0 or is_copy)
        ]
        groups = new_groups(ranks)
        if dist.get_rank() in ranks:
            is_owner = place.pipeline[0] == 0
            tied = next(
                p for p in parameters if (p.plain == EMBEDDING if is_owner else p.is_tied_copy)
            )
            found.append(TiedWeight(tied.name, tied.tensor.numel(), *groups, is_owner))
    return found
