"""Clusters that hold different models: more than half decide, and anchors are compared, too."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset
from dsx.method.method import Method
from dsx.outer.bit_hash import BitHash
from dsx.outer.parity_check import ANCHOR, MEAN, ParityResult, Sides
from dsx.outer.recovery import ParityError
from tests.checkpoint.saved import save_state
from tests.levels import by_default
from tests.outer.test_parity_check import come_apart, lose_a_weight, sgd
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

WITH_ANCHOR = [
    "diloco", "streaming_diloco", "diloco_delayed", "eager", "cocodc", "co2", "dilocox",
    "co2's penalty on streaming fragments",
]  # fmt: skip
SIGN, EXPONENT, LOWEST = 31, 30, 0


def flip(anchor: torch.Tensor, bit: int) -> None:
    mask = 1 << bit if bit < 31 else -(1 << 31)
    anchor.view(torch.int32)[3] ^= mask


def anchors(run: Simulated, cluster: int) -> list[torch.Tensor]:
    return run.loops[cluster].state.anchor


def are_same(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(some, others, strict=True))


def are_equal(run: Simulated) -> bool:
    return all(are_same(anchors(run, m), anchors(run, 0)) for m in range(run.num_clusters))


def started(method: Method, num_clusters: int = 3, num_steps: int = 6) -> Simulated:
    run = Simulated(TinyNet(), sgd, method, num_clusters)
    for _ in range(num_steps):
        run.train_step(mean_loss)
    return run


@pytest.mark.parametrize(
    ("num_clusters", "apart", "refused_by", "right", "is_majority"),
    [
        (3, [], [], [0, 1, 2], True),
        (3, [(0, 1), (0, 2)], [], [1, 2], True),  # the first one is wrong
        (3, [(0, 2), (1, 2)], [0], [0, 1], True),  # NaN or not: it holds the same model
        (3, [(0, 1), (0, 2), (1, 2)], [], [0], False),
        (3, [(0, 1), (0, 2), (1, 2)], [0], [1], False),  # nobody goes on from its model
        (2, [(0, 1)], [], [0], False),
        (2, [(0, 1)], [0], [1], False),
        (4, [(0, 2), (0, 3), (1, 2), (1, 3)], [], [0, 1], False),
        (5, [(0, 1), *((a, b) for a in (0, 1) for b in (2, 3, 4))], [], [2, 3, 4], True),
    ],
)
def test_more_than_half_are_right(
    num_clusters: int,
    apart: Any,
    refused_by: list[int],
    right: list[int],
    is_majority: bool,
) -> None:
    ids = [7 + m for m in range(num_clusters)]
    sides = Sides.of(ids, [(a + 7, b + 7) for a, b in apart], [m + 7 for m in refused_by])
    assert sides.right == [m + 7 for m in right] and sides.is_majority == is_majority
    assert sorted(sides.right + sides.wrong) == ids


@pytest.mark.parametrize("name", WITH_ANCHOR)
def test_the_first_cluster_does_not_win_against_two(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has another model; the others' model goes on, whatever `on_mismatch`."""
    run = started(ALL_CASES[name].method(3), num_steps=4)
    come_apart(run, 0)
    was_equal = []
    with caplog.at_level(logging.ERROR):
        for _ in range(24):
            two = [a.clone() for a in anchors(run, 1)]
            run.train_step(mean_loss)
            was_equal.append(are_equal(run))
            assert are_same(anchors(run, 1), anchors(run, 2))
            if not was_equal[-1]:
                wrong = anchors(run, 0)[0].clone()
    assert not all(was_equal) and was_equal[-1]
    assert not torch.equal(wrong, two[0])
    assert "cluster 0 has applied another mean than cluster 1 in round" in caplog.text
    assert "2 of 3 agree: taking cluster 1's outer state of the fragment" in caplog.text


@pytest.mark.parametrize("bit", by_default([SIGN, EXPONENT, LOWEST], LOWEST))
@pytest.mark.parametrize("cluster", by_default([0, 2], 2))
@pytest.mark.parametrize("name", WITH_ANCHOR)
def test_a_flipped_bit_of_an_anchor_is_found_named_and_mended(
    name: str, cluster: int, bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Compared in every round, nothing of it reaches the others' models."""
    run = started(replace(ALL_CASES[name].method(3), anchor_check_interval=1))
    flip(anchors(run, cluster)[0], bit)
    giver = 0 if cluster else 1
    with caplog.at_level(logging.ERROR):
        for _ in range(30):
            run.train_step(mean_loss)
            for m in {0, 1, 2} - {cluster}:
                assert all(a.abs().max() < 10 for a in anchors(run, m))
                assert are_same(anchors(run, m), anchors(run, giver))
        run.finish()
    assert are_equal(run)
    assert f"cluster {cluster} holds another anchor than cluster {giver} after" in caplog.text
    assert caplog.text.count("holds another anchor") == 3  # by each, once
    for model in run.models:
        assert all(p.isfinite().all() and p.abs().max() < 10 for p in model.parameters())


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_a_cluster_that_is_wrong_goes_on_from_the_majoritys_anchor(state_dtype: str) -> None:
    """As if it had stood where the others stand: from then on it is the run without the flip."""
    own = {"state_dtype": state_dtype}
    method = preset("diloco", schedule={"interval": 4}, outer_optimizer=own)
    method = replace(method, anchor_check_interval=1)
    run = started(method, num_steps=8)
    flip(anchors(run, 0)[0], EXPONENT)
    run.loops[0].state.slots[0].outer["momentum"].mul_(2)  # not looked at, but taken with it
    kept = [a.clone() for a in anchors(run, 1)]
    for _ in range(4):
        run.train_step(mean_loss)
    assert run.loops[0].totals.refused == run.loops[1].totals.refused == 1
    assert are_same(anchors(run, 0), kept)
    mine, theirs = (run.loops[m].state.slots[0].outer["momentum"] for m in (0, 1))
    kept_in = torch.float32 if state_dtype == "fp32" else torch.bfloat16
    assert torch.equal(mine, theirs) and mine.dtype == kept_in
    for own in run.parameters():
        assert all(torch.equal(own[n], theirs) for n, theirs in run.parameters()[1].items())


@pytest.mark.parametrize(("interval", "most"), [(1, 4), (3, 12), (8, 32)])
def test_anchors_are_compared_every_few_rounds(
    interval: int, most: int, caplog: pytest.LogCaptureFixture
) -> None:
    method = preset("diloco", schedule={"interval": 4})
    run = started(replace(method, anchor_check_interval=interval))
    flip(anchors(run, 2)[0], LOWEST)
    steps = 0
    while "holds another anchor" not in caplog.text:
        assert steps <= most
        run.train_step(mean_loss)
        steps += 1
    assert (steps > 4) == (interval > 1)


@pytest.mark.parametrize("interval", [0, 8])
def test_the_end_compares_anchors_unless_they_are_never_compared(interval: int) -> None:
    run = started(
        replace(preset("diloco", schedule={"interval": 4}), anchor_check_interval=interval)
    )
    flip(anchors(run, 2)[0], LOWEST)
    run.finish()
    assert are_equal(run) == bool(interval)


@pytest.mark.parametrize("name", ["diloco", "eager"])
def test_two_clusters_stop(name: str) -> None:
    """Nobody knows which of two is right: that is the default, and a mean's too."""
    method = replace(ALL_CASES[name].method(2), anchor_check_interval=1)
    run = started(method, 2)
    flip(anchors(run, 0)[0], LOWEST)
    said = r"cluster 1 holds another anchor than cluster 0 .*1 of 2 agree \(on_mismatch is 'stop'\)"
    with pytest.raises(ParityError, match=said):
        for _ in range(12):
            run.train_step(mean_loss)


def test_two_clusters_go_on_if_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """From the one that sends finite values, though it is the second."""
    method = replace(preset("diloco", schedule={"interval": 4}), on_mismatch="resend")
    run = started(replace(method, anchor_check_interval=1), 2, num_steps=4)
    right = [a.clone() for a in anchors(run, 1)]
    flip(anchors(run, 0)[0], LOWEST)
    for _ in range(3):
        run.train_step(mean_loss)
    for cluster, model in enumerate(run.models):
        run.optimizers[cluster].zero_grad()
        mean_loss(model, cluster, 8).backward()
        run.optimizers[cluster].step()
    next(run.models[0].parameters()).data.view(-1)[0] = float("nan")
    run.step()
    assert "cluster 0 holds another anchor than cluster 1" in caplog.text
    for m in range(2):
        assert are_same(anchors(run, m), right)


def test_what_is_under_way_when_clusters_are_mended_is_left_out(tmp_path: Path) -> None:
    """Of a delayed method, and by a run that is resumed meanwhile."""
    method = replace(ALL_CASES["diloco_delayed"].method(3), anchor_check_interval=1)
    run = started(method, num_steps=4 * method.schedule.interval)
    flip(anchors(run, 0)[0], EXPONENT)
    while not run.loops[1].totals.refused:
        run.train_step(mean_loss)
    assert run.loops[1].history.mended[0] == run.num_steps
    for m, loop in enumerate(run.loops):
        save_state(loop, tmp_path / str(m), RankInfo(m, 3, 0, 1), "a run", {}, {})
    second = Simulated(TinyNet(), sgd, method, 3)
    for m, loop in enumerate(second.loops):
        load_state(loop, tmp_path / str(m), RankInfo(m, 3, 0, 1), {})
        second.models[m].load_state_dict(run.models[m].state_dict())
    for _ in range(3 * method.schedule.interval):
        for one in (run, second):
            one.train_step(mean_loss)
        assert run.loops[0].history == second.loops[0].history
    assert run.loops[1].totals.refused == 2 == second.loops[1].totals.refused
    assert are_equal(run) and are_equal(second)
    assert all(a.abs().max() < 10 for a in anchors(run, 1))
    assert are_same(anchors(run, 0), anchors(second, 0))


def test_a_nan_in_the_first_cluster_does_not_hide_who_is_wrong() -> None:
    run = started(
        replace(preset("diloco", schedule={"interval": 4}), anchor_check_interval=1), 3, 0
    )
    flip(anchors(run, 2)[0], LOWEST)
    lose_a_weight(run, 4)
    assert run.loops[0].totals.refused == 1 and are_equal(run)


def test_what_dsx_0_2_saved_of_a_mismatch_is_not_forgotten() -> None:
    old = {"refused_by": [], "differing": [2], "round": 3, "is_refused": False}
    parity = ParityResult.of_saved([old], [0, 1, 2])
    assert parity.apart == [[0, 2, MEAN], [1, 2, MEAN]] and parity.differing == [2]
    shards = [{**old, "differing": [], "apart": [[0, 1, ANCHOR]]}, {**old, "apart": []}]
    assert ParityResult.of_saved(shards, [0, 1]).apart == [[0, 1, ANCHOR]]


@pytest.mark.parametrize("numel", [0, 1, 2, 131_071, 131_072, 131_073, 700_001])
def test_a_hash_is_the_same_by_whatever_number_of_tiles_at_a_time(
    numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator takes 64 tiles at a time, a processor one."""
    from dsx.outer import bit_hash

    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    one = int(BitHash().of(x))
    monkeypatch.setattr(bit_hash, "_ROWS_ON_HOST", 3)
    assert int(BitHash().of(x)) == one
