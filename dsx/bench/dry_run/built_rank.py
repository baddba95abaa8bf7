"""What a dry run keeps of a rank that it has built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dsx.core.types import Fragment, Stage


@dataclass(frozen=True)
class BuiltRank:
    """One rank of a cluster, read off its adapter.

    `numel` are the weights that it holds, `num_tensors` the parameters of each whole fragment,
    `buffer_bytes` what its adapter takes for collectives inside the cluster.
    """

    rank: int
    stage: Stage
    numel: int
    fragments: Sequence[Fragment]
    num_tensors: Sequence[int]
    buffer_bytes: int
