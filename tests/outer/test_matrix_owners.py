"""Matrices are dealt to ranks by bytes and elements, over all fragments, and stay if they may."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.compress.low_rank import LowRank
from dsx.compress.owners import factor_rounds
from dsx.compress.wire.formats import FORMATS
from dsx.core.types import Slot
from dsx.outer.matrix_owners import Matrix, deal

ALL_ALIKE = [(9, 4), (5, 3), (1, 1)]  # elements, and bytes


def dealt_to_all(
    sizes: Sequence[tuple[int, int]], num_ranks: int, fragments: int
) -> tuple[list[Matrix], list[int]]:
    """As under ZeRO-3: every rank holds as much of every matrix."""
    matrices = [
        Matrix(fragment, numel * num_ranks, sent, dict.fromkeys(range(num_ranks), numel))
        for fragment in range(fragments)
        for numel, sent in sizes
    ]
    return matrices, deal(matrices, np.zeros((num_ranks, 2), dtype=np.int64))


def test_what_divides_evenly_is_dealt_so_whatever_the_fragments() -> None:
    """12 fragments over 6 ranks: by fragment the largest would go to one after another."""
    matrices, owners = dealt_to_all(ALL_ALIKE, 6, 12)
    for size in ALL_ALIKE:
        own = [o for m, o in zip(matrices, owners, strict=True) if m.sent == size[1]]
        assert [own.count(rank) for rank in range(6)] == [2] * 6
    per_fragment = [owners[3 * f : 3 * f + 3] for f in range(12)]
    assert all(largest != next_one for largest, next_one, _ in per_fragment)


def test_bytes_count_where_elements_would_be_even() -> None:
    """Four matrices of as many elements, two of which send three times as much."""
    matrices = [Matrix(0, 100, sent, {0: 50, 1: 50}) for sent in (30, 30, 10, 10)]
    owners = deal(matrices, np.zeros((2, 2), dtype=np.int64))
    assert {owners[0], owners[1]} == {owners[2], owners[3]} == {0, 1}


def test_a_whole_matrix_moves_where_a_rank_has_too_much_and_else_stays() -> None:
    even = [Matrix(0, 100, 10, {rank: 100}, rank) for rank in (0, 1)]
    nothing = np.zeros((2, 2), dtype=np.int64)
    assert deal(even, nothing) == [0, 1]
    assert sorted(deal([m._replace(home=0, held={0: 100}) for m in even], nothing)) == [0, 1]
    # one in codes, which stays, sends so much that nothing else matters
    codes = np.array([[100, 1000], [0, 0]])
    own = [Matrix(0, 100, 10, {rank: 100}, rank) for rank in (0, 1, 1)]
    assert deal(own, codes) == [0, 1, 1]


SIZES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 50)), min_size=1, max_size=20)


@settings(deadline=None)
@given(sizes=SIZES, num_ranks=st.integers(1, 6), seed=st.integers(0, 99))
def test_nobody_has_more_than_its_share_and_one_matrix(
    sizes: list[tuple[int, int]], num_ranks: int, seed: int
) -> None:
    matrices, owners = dealt_to_all(sizes, num_ranks, 1 + seed % 3)
    loads = np.zeros((num_ranks, 2))
    for matrix, owner in zip(matrices, owners, strict=True):
        loads[owner] += matrix.numel, matrix.sent
    each = np.array([(matrix.numel, matrix.sent) for matrix in matrices])
    mean = loads.mean(axis=0)
    # each dealt matrix adds to a rank that had least, of the larger share, of two at most
    assert (loads / mean).max() <= 2 + (each / mean).max()
    assert owners == dealt_to_all(sizes, num_ranks, 1 + seed % 3)[1]


def test_bytes_are_about_what_one_of_many_clusters_sends() -> None:
    codec, clusters = LowRank(rank=64, factor_wire="int4"), 64
    for m, n in ((4096, 1024), (1024, 4096), (2048, 2048)):
        rounds = factor_rounds(((m, n, 64),), (64,), FORMATS["int4"](), clusters, 0)
        sent = rounds[:, :, 0].sum(axis=0).mean()
        usual = codec.usual_bytes(Slot("w", (m, n), 0), 0)
        assert 0.9 * sent <= usual <= 1.1 * sent
