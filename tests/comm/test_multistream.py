"""Cutting a message for several connections: nothing is lost, and both ends cut alike."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dsx.comm.multistream import LEAST_PIECE_BYTES, MAX_STREAMS, piece_bounds, pieces
from dsx.config.schema import ConfigError, load_config

SIZES = st.one_of(
    st.integers(0, 2**40),
    st.builds(lambda k, d: k * LEAST_PIECE_BYTES + d, st.integers(0, 70), st.integers(0, 2)),
    st.integers(1, 70).map(lambda k: k * LEAST_PIECE_BYTES - 1),
)


@given(SIZES, st.integers(1, MAX_STREAMS))
def test_pieces_are_a_partition_into_nearly_equal_parts(size: int, streams: int) -> None:
    bounds = piece_bounds(size, streams)
    assert bounds[0][0] == 0 and bounds[-1][1] == size
    assert all(end == start for (_, end), (start, _) in zip(bounds, bounds[1:], strict=False))
    lengths = [stop - start for start, stop in bounds]
    assert max(lengths) - min(lengths) <= 1
    assert len(bounds) <= streams
    if len(bounds) > 1:
        assert min(lengths) >= LEAST_PIECE_BYTES
    if len(bounds) < streams:  # one more would be too short
        assert size < (len(bounds) + 1) * LEAST_PIECE_BYTES


@given(
    st.integers(0, 40_000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.bool]),
    st.integers(1, MAX_STREAMS),
)
def test_pieces_are_views_of_the_bytes_in_order(numel: int, dtype: torch.dtype, n: int) -> None:
    sent = (torch.arange(numel) % 251).to(dtype)
    received = torch.zeros(numel, dtype=dtype)
    for source, target in zip(pieces(sent, n), pieces(received, n), strict=True):
        target.copy_(source)
    assert torch.equal(received, sent)


@pytest.mark.parametrize("given_streams", [0, 65, 1.5, "2"])
def test_other_numbers_of_streams_are_refused(given_streams: object) -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    assert load_config({"dsx": block}).link.streams == 1
    with pytest.raises(ConfigError, match="dsx.link.streams="):
        load_config({"dsx": {**block, "link": {"streams": given_streams}}})
