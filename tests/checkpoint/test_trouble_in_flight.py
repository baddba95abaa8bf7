"""Saves of a round that is refused, and of one that a penalty has been weighed with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.config.schema import preset
from dsx.engines import simulated
from dsx.outer.transfer import Transfer
from tests.checkpoint.half_arrived import (
    HoldingHub,
    assert_same,
    catch_up,
    hold,
    lacking,
    resume,
    save_all,
)
from tests.checkpoint.test_half_arrived import CODECS
from tests.compress.test_over_gloo import WideNet, loss
from tests.simulated import Simulated

NUM_STEPS = 9


@pytest.fixture(autouse=True)
def _holding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "InProcessHub", HoldingHub)


def new_run(kind: str, num_clusters: int, **axes: Any) -> Simulated:
    method = preset(kind, num_clusters, **axes)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    return Simulated(WideNet(), lambda m: sgd(m.parameters()), method, num_clusters)


def train(run: Simulated, num_steps: int, bad_step: int = 0) -> None:
    """Until so many steps; cluster 0's loss is not finite in the bad one."""

    def maybe_bad(model: nn.Module, cluster: int, step: int) -> Tensor:
        value = loss(model, cluster, step)
        return value * float("nan") if (cluster, step) == (0, bad_step) else value

    while run.num_steps < num_steps:
        run.train_step(maybe_bad)


@pytest.mark.parametrize("held", [(), (1,)])
@pytest.mark.parametrize(
    ("codec", "num_clusters"), [("low rank", 2), ("low rank, cold", 4), ("int4, fp32", 4)]
)
def test_a_refused_round_in_flight_is_saved(
    codec: str, num_clusters: int, held: tuple[int, ...], tmp_path: Path
) -> None:
    """It has left the codec's state as it was: of before and of now are the same."""

    def new() -> Simulated:
        axes = {"schedule": {"interval": 3}, "compression": CODECS[codec]}
        return new_run("diloco_delayed", num_clusters, **axes)

    whole, first, second = new(), new(), new()
    train(whole, NUM_STEPS, bad_step=6)
    train(first, 5)
    if held:
        hold(first, held)
    train(first, 7, bad_step=6)
    assert [bool(found) for found in lacking(first)] == [m in held for m in range(num_clusters)]
    under_way = [t for t in first.loops[0].in_flight if isinstance(t, Transfer)]
    assert [t.buffers.parity.refused_by for t in under_way] == [[0]]
    save_all(first, tmp_path)
    resume(second, first, tmp_path)
    train(second, NUM_STEPS)
    assert_same(second, whole)
    assert [loop.history.rounds for loop in second.loops] == [[1]] * num_clusters


@pytest.mark.parametrize("granularity", ["tensor", "element"])
def test_who_has_applied_a_mean_hands_over_the_sizes_that_came_with_it(
    granularity: str, tmp_path: Path
) -> None:
    """The penalty has used them; another cluster, which left this boundary, has yet to."""

    def new() -> Simulated:
        axes = {
            "schedule": {"interval": 3},
            "staleness": {"type": "gap", "granularity": granularity},
        }
        return new_run("diloco", 2, **axes)

    whole, first, second = new(), new(), new()
    train(whole, NUM_STEPS)
    train(first, 5)
    hold(first, (1,))
    train(first, 6)
    assert [loop.deferral.is_deferred for loop in first.loops] == [False, True]
    save_all(first, tmp_path, keeps_last=True)
    resume(second, first, tmp_path)
    catch_up(second, loss)
    train(second, NUM_STEPS)
    assert_same(second, whole)


@pytest.mark.parametrize(("before", "now", "held"), [(3, 2, (0,)), (2, 3, (1,)), (2, 3, (0,))])
def test_a_mean_is_handed_over_to_another_number_of_clusters(
    before: int, now: int, held: tuple[int, ...], tmp_path: Path
) -> None:
    """The parity check remembers nothing of other shards: on either side of the hand-over."""
    axes = {"schedule": {"interval": 3}, "compression": {"type": "dense"}}
    first, second = (new_run("diloco_delayed", count, **axes) for count in (before, now))
    train(first, 5)
    hold(first, held)
    train(first, 7)
    save_all(first, tmp_path)
    resume(second, first, tmp_path)
    train(second, 14)
    second.finish()
    anchors = [loop.state.anchor[0] for loop in second.loops]
    assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
    assert [loop.history.rounds for loop in second.loops] == [[4]] * now


@pytest.mark.parametrize("kind", ["diloco", "local_sgd"])
def test_what_is_exported_right_after_a_resume_is_the_same_in_all_clusters(
    kind: str, tmp_path: Path
) -> None:
    """Also where one cluster has left a boundary that another has ended."""
    axes = {"schedule": {"interval": 3}}
    first, second, whole = (new_run(kind, 2, **axes) for _ in range(3))
    train(whole, 6)
    train(first, 5)
    hold(first, (1,))
    train(first, 6)
    assert [loop.deferral.is_deferred for loop in first.loops] == [False, True]
    save_all(first, tmp_path, keeps_last=True)
    resume(second, first, tmp_path)
    with whole.averaged() as expected, second.averaged():
        for model in second.models:
            for name, value in model.state_dict().items():
                assert torch.equal(value, expected.state_dict()[name]), name
    assert_same(second, whole)
