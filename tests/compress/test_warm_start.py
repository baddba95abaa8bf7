"""What a matrix starts from, in the codes that its mean came in."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from dsx.compress.factors import DownCodec
from dsx.compress.low_rank_channel import LowRankChannel
from dsx.compress.owners import down_bytes
from dsx.compress.warm_start import WarmStart, in_codes
from dsx.core.buffers import Buffers
from tests.compress.channels import Clusters, correlated, fragment_of
from tests.compress.matrices import plain_low_rank


def decoded(values: Tensor) -> Tensor:
    """What everybody makes of a mean's codes."""
    rows, length = values.shape
    codec = DownCodec(length, False)
    message = torch.empty(down_bytes(False, rows, length), dtype=torch.uint8)
    codec.encode(values, message)
    codes = torch.empty(rows, length)
    return codes.mul_(codec.decode(message, codes))


def mean_of(rows: int, length: int, seed: int = 0) -> Tensor:
    """Directions whose sizes, and whose columns, differ by orders; a column is zero."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, length, generator=generator)
    values *= torch.logspace(2, -3, rows).unsqueeze(1)
    values *= torch.logspace(-20, 15, length)
    values[:, length // 2] = 0
    return values


@pytest.mark.parametrize("rows", [1, 5, 64])
def test_the_codes_of_what_was_kept_in_fp32_are_found_again(rows: int) -> None:
    values = decoded(mean_of(rows, 90, rows))
    codes, scales = in_codes(values)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float32
    assert torch.equal(codes * scales, values)


def test_so_they_are_of_some_of_its_rows() -> None:
    """A run with a smaller rank has left the largest codes behind."""
    values = decoded(mean_of(40, 90))
    for kept in (values[7:], values[30:], values[39:]):
        codes, scales = in_codes(kept)
        assert torch.equal(codes * scales, kept)


def test_what_comes_of_no_codes_is_rounded_as_a_mean_is() -> None:
    values = mean_of(12, 50)
    codes, scales = in_codes(values)
    assert torch.equal(codes * scales, decoded(values))
    assert not in_codes(torch.zeros(3, 4))[0].any()


def kept_by(channels: Sequence[LowRankChannel], name: str) -> list[Tensor]:
    slots = [channel.slots for channel in channels]
    return [each[f"q.{name}"] * each[f"q_scale.{name}"] for each in slots]


@pytest.mark.parametrize("num_clusters", [2, 5, 9])
def test_all_keep_the_mean_that_all_apply(num_clusters: int) -> None:
    """P, which is orthonormal, spans what is applied, P Q^T: so |mean| is |Q| but for P's codes."""
    fragment = fragment_of((96, 80), (700, 120))
    clusters = Clusters(plain_low_rank(rank=6, factor_wire="int4"), fragment, num_clusters)
    for round in (1, 2):
        mean = clusters.average(correlated(fragment.numel, num_clusters, seed=round))
    for index, name in enumerate(("w0", "w1")):
        warm = kept_by(clusters.channels, name)
        assert all(torch.equal(each, warm[0]) for each in warm)
        size, applied = warm[0].norm(), clusters.matrix(index, mean).norm()
        assert float(size) == pytest.approx(float(applied), rel=0.02)


def test_it_takes_a_byte_for_each_value_and_what_is_read_is_their_products() -> None:
    state, exact = Buffers(), Buffers()
    torch.manual_seed(3)
    warm = WarmStart("w", 6, 40, False, state)
    assert WarmStart("w", 6, 40, True, exact).slots.keys() == {"q.w"}
    assert (state.num_bytes, exact.num_bytes) == (6 * 40 + 4 * 40, 4 * 6 * 40)
    assert warm.num_directions == 0
    codes, scales = in_codes(decoded(torch.randn(4, 40)))
    warm.slots["q.w"][:4] = codes
    warm.slots["q_scale.w"].copy_(scales)
    assert warm.num_directions == 4
    assert torch.equal(warm.read(torch.empty(3, 40)), (codes * scales)[:3])


def test_a_round_at_a_smaller_rank_leaves_nothing_of_the_one_before() -> None:
    fragment = fragment_of((96, 80))
    clusters = Clusters(plain_low_rank(rank=4), fragment, 2, max_rank=12)
    values = correlated(fragment.numel, 2)
    for rank, expected in ((12, 12), (3, 3), (7, 7)):
        clusters.average(values, rank)
        codes = clusters.channels[0].slots["q.w0"]
        assert codes.any(dim=1).tolist() == [i < expected for i in range(12)]
