"""Settings that change while training goes on: from a step on, to the bit, and in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from dsx.config.schema import preset
from dsx.core.types import History
from dsx.method.changes import INTERVAL, MOMENTUM, OF_METHOD, RATE, require_change
from dsx.method.method import Method
from tests.comm.links.sites import Site, run
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

NUM_STEPS, AT = 24, 9


def require(method: Method, key: str, value: float, **changed: float) -> float:
    named = {key.replace("__", "."): one for key, one in changed.items()}
    return require_change(method, named, key, value, num_fragments=3, num_stages=1)


def test_what_a_method_may_have_is_kept_as_what_it_is() -> None:
    method = preset("streaming_diloco", schedule={"interval": 12}, delay={"steps": 2})
    assert require(method, INTERVAL, 24.0) == 24 and type(require(method, INTERVAL, 24.0)) is int
    assert require(method, INTERVAL, 3) == 3
    assert require(method, RATE, 0.25) == 0.25
    assert require(method, MOMENTUM, 0) == 0.0


@pytest.mark.parametrize(
    ("name", "overrides", "key", "value", "why"),
    [
        ("diloco", {}, INTERVAL, 2.5, "must be a whole number"),
        ("diloco", {}, INTERVAL, 0, "of at least 1"),
        ("diloco", {}, RATE, -1.0, "lr"),
        ("diloco", {}, MOMENTUM, 1.0, "momentum"),
        ("diloco", {}, RATE, float("nan"), "must be a finite number"),
        ("local_sgd", {}, MOMENTUM, 0.5, "has no momentum"),
        ("streaming_diloco", {"delay": {"steps": 4}}, INTERVAL, 4, "delay.steps=4"),
        ("recommended", {"schedule": {"interval": 30}}, INTERVAL, 15, "in steps, to 16 now"),
        ("dilocox", {}, INTERVAL, 100, "controller"),
        ("diloco", {"guard": {"action": "step_down"}}, INTERVAL, 100, "guard moves it"),
    ],
)
def test_what_it_may_not_have_is_refused_by_name(
    name: str, overrides: Mapping[str, Mapping[str, object]], key: str, value: float, why: str
) -> None:
    guard = dict(overrides).pop("guard", None)
    method = preset(name, **{k: v for k, v in overrides.items() if k != "guard"})
    if guard is not None:
        from dataclasses import replace

        method = replace(method, guard="step_down")
    with pytest.raises(ValueError, match=why):
        require(method, key, value)


def test_h_goes_down_in_steps_where_a_mean_may_take_half_of_it() -> None:
    method = preset("recommended", schedule={"interval": 30})
    assert require(method, INTERVAL, 16) == 16
    assert require(method, INTERVAL, 9, schedule__interval=16) == 9
    with pytest.raises(ValueError, match="half of 16 or less"):
        require(method, INTERVAL, 8, schedule__interval=16)


def test_a_checkpoint_has_them() -> None:
    history = History(2)
    history.changed[RATE] = 0.25
    assert History.from_state_dict(history.state_dict()).changed == {RATE: 0.25}
    old = history.state_dict()
    del old["changed"]
    assert History.from_state_dict(old).changed == {}


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)  # as sites have


CHANGES = [
    ("diloco", {RATE: 0.3, MOMENTUM: 0.5}),
    ("streaming_diloco", {INTERVAL: 8}),
    ("recommended", {INTERVAL: 6, RATE: 0.4}),
]


@pytest.mark.parametrize(("name", "changes"), CHANGES)
def test_over_links_a_change_is_that_of_clusters_of_one_process_to_the_bit(
    name: str, changes: Mapping[str, float]
) -> None:
    method = ALL_CASES[name].method(3)
    for key, value in changes.items():
        assert key in OF_METHOD and require(method, key, value) == value
    plain, changed = (Simulated(TinyNet(), adamw, method, 3) for _ in range(2))
    for step in range(1, NUM_STEPS + 1):
        if step == AT:
            for loop in changed.loops:
                loop.history.changed.update(changes)
        plain.train_step(mean_loss)
        changed.train_step(mean_loss)
    for simulated in (plain, changed):
        simulated.finish()

    def before(site: Site, step: int) -> None:
        if step == AT:
            assert site.loop is not None
            site.loop.history.changed.update(changes)

    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, before=before)
    for site, expected, other in zip(sites, changed.parameters(), plain.parameters(), strict=True):
        for parameter, value in site.model.named_parameters():
            assert torch.equal(value, expected[parameter])
        assert any(not torch.equal(expected[name], other[name]) for name in other)
    counts = [sum(one.loops[0].history.launches) for one in (plain, changed)]
    assert (counts[0] != counts[1]) == (INTERVAL in changes)
