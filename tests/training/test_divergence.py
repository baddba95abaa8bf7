"""When losses count as diverged, and what follows where training may not go back."""

from __future__ import annotations

import pytest

from dsx.config.divergence import DivergenceConfig
from dsx.config.files import ConfigError
from dsx.config.schema import load_config
from dsx.outer.recovery import NonFiniteError
from dsx.training.divergence import Divergence, refuse_stages
from tests.checkpoint.test_keep import Board


def watch(board: Board, cluster: int = 0, **config: object) -> Divergence:
    return Divergence(DivergenceConfig.model_validate(config), board.of(cluster))


def tell(divergence: Divergence, losses: list[float], first: int = 1) -> None:
    for step, loss in enumerate(losses, start=first):
        divergence.look_at(loss, step)


def test_so_many_in_a_row_have_to_be_beyond_a_bound() -> None:
    board = Board()
    divergence = watch(board, max_loss=5.0, max_rollbacks=1)
    tell(divergence, [4, 6, 6, 5, 6, float("nan"), float("inf")])
    (posted,) = board.posted
    assert (posted.kind, posted.payload["since"]) == ("diverged", 5)
    assert posted.payload["why"] == "its loss is inf at step 7 with a bound of 5, so since step 5"


def test_a_bound_follows_the_median() -> None:
    board = Board()
    divergence = watch(board, max_loss_factor=2.0, patience=1)
    tell(divergence, [8.0] * 5 + [90.0] + [2.0] * 6)  # without a median as yet, nothing is too much
    assert not board.posted
    tell(divergence, [2.0] * 100, 20)
    tell(divergence, [3.9, 4.1], 200)
    assert [posted.payload["since"] for posted in board.posted] == [201]
    watch(board).look_at(float("nan"), 1)
    assert len(board.posted) == 1


def test_all_take_it_up_once_and_so_many_times() -> None:
    board = Board()
    clusters = [watch(board, m, max_loss=5.0, patience=1, max_rollbacks=1) for m in range(2)]
    clusters[1].look_at(9.0, 7)
    clusters[0].look_at(9.0, 8)
    for divergence in clusters:
        divergence.pass_boundary(10, str)
        due = divergence.take_due()
        assert due is not None and due.since == 7 and due.why.startswith("cluster 1 has diverged")
        assert divergence.take_due() is None
    clusters[0].look_at(9.0, 9)
    message = r"cluster 0 has diverged: .* all clusters end at step 12, having gone back 1 of 1"
    for divergence in clusters:
        with pytest.raises(NonFiniteError, match=message):
            divergence.pass_boundary(12, str)


def test_what_was_posted_before_going_back_is_over() -> None:
    board = Board()
    clusters = [watch(board, m, max_loss=5.0, patience=1, max_rollbacks=2) for m in range(2)]
    clusters[1].look_at(9.0, 7)
    clusters[0].pass_boundary(8, str)
    assert clusters[0].take_due()
    clusters[1].look_at(9.0, 8)  # of the stretch that is left, and on its way still
    clusters[0].pass_boundary(6, str)
    assert clusters[0].take_due() is None


def test_where_nothing_can_go_back_training_ends() -> None:
    board = Board()
    divergence = watch(board, max_loss=5.0, patience=1, max_rollbacks=2)
    divergence.look_at(9.0, 7)
    message = r"\(divergence.max_rollbacks\); cluster 1 cannot: start again from .* before step 7"
    with pytest.raises(NonFiniteError, match=message):
        divergence.pass_boundary(8, lambda: "cluster 1 cannot")
    assert divergence.bad_since == 7


def test_what_is_saved_meanwhile_is_in_doubt_and_then_in_trouble() -> None:
    board = Board()
    clusters = [watch(board, m, max_loss=5.0, patience=2, max_rollbacks=1) for m in range(2)]

    def seen() -> list[tuple[bool, int | None]]:
        return [(one.is_doubtful, one.bad_since) for one in clusters]

    clusters[1].look_at(9.0, 6)
    clusters[1].look_at(4.0, 7)
    assert seen() == [(False, None), (False, None)]
    clusters[1].look_at(9.0, 8)
    assert seen() == [(False, None), (True, None)]
    clusters[1].look_at(9.0, 9)
    clusters[1].look_at(4.0, 10)  # nobody else knows as yet, and it is not good again
    assert seen() == [(False, None), (False, 8)]
    for divergence in clusters:
        divergence.pass_boundary(10, str)
    assert seen() == [(False, 8), (False, 8)]
    for divergence in clusters:
        assert divergence.take_due()
        divergence.has_gone_back()
    assert seen() == [(False, None), (False, None)]


def test_what_has_no_effect_is_refused() -> None:
    clusters = {"num_clusters": 2}
    for divergence, message in (
        ({"patience": 2}, "patience=2 has no effect without a bound"),
        ({"data": "as_saved"}, "data='as_saved' has no effect where a run does not go back"),
        ({"max_loss": float("inf")}, "max_loss"),
    ):
        block = {"preset": "diloco", "clusters": clusters, "divergence": divergence}
        with pytest.raises(ConfigError, match=message):
            load_config({"dsx": block})
    with pytest.raises(ConfigError, match="max_rollbacks=1 is not served with 2 pipeline stages"):
        refuse_stages(DivergenceConfig(max_rollbacks=1), 2)
