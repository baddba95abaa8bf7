"""The model of a plan: its parameters, and each rank's share of them."""

from __future__ import annotations

import pytest

from dsx.compress.low_rank import LowRank
from dsx.core.types import ParameterShape
from dsx.method.fragments import ByLayer
from dsx.plan.model import from_sizes
from dsx.plan.traffic import one_rank


def test_ranks_share_what_one_would_hold() -> None:
    codec, fragmenter = LowRank(rank=16, exclude=("mlp.up",)), ByLayer(4, "sequential")
    one, many = (
        from_sizes(8 * 12 * 64**2, 8, 64, ranks).loads(fragmenter, codec) for ranks in (1, 3)
    )
    for alone, shared in zip(one, many, strict=True):
        assert sum(len(share.shards) for share in shared.shares) == 3
        assert alone.numel <= shared.numel < alone.numel + 3 * alone.num_tensors
        taken = [
            slot.shape
            for share in shared.shares
            for slot in codec.split(share.fragment)[0] * len(share.shards)
        ]
        assert sorted(taken) == sorted(s.shape for s in codec.split(alone.shares[0].fragment)[0])


def test_whole_matrices_are_shared_out_evenly_over_all_fragments() -> None:
    codec, ranks = LowRank(rank=4), 5
    model = from_sizes(30 * 12 * 64**2, 30, 64, ranks)
    sent = [0] * ranks
    for load in model.loads(ByLayer(10, "sequential"), codec):
        for share in load.shares:
            for rank in share.shards:
                sent[rank] += share.fragment.numel
    assert max(sent) - min(sent) <= 4 * 64**2  # the largest matrix


def test_equal_shares_are_kept_once() -> None:
    model = from_sizes(8 * 12 * 64**2, 8, 64, ranks=3)
    for load in model.loads(ByLayer(4), LowRank(exclude=("layers",))):
        assert [share.ranks for share in load.shares] == [3]


def test_a_width_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="hidden=4096: .* try --hidden="):
        from_sizes(1e9, 100, 4096, 1)


def test_a_model_has_the_parameters_it_was_given() -> None:
    assert from_sizes(7e9, 32, 4096, 8).numel == pytest.approx(7e9, rel=1e-3)
    assert from_sizes(7e9, 32, None, 8).numel == pytest.approx(7e9, rel=1e-6)
    shapes = [ParameterShape("layers.0.weight", (2, 3))]
    assert one_rank(ByLayer(), shapes)[0][0].numel == 6
