"""What `Method.validate` refuses beyond the axes' own ranges, for methods built in Python too."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor

from dsx.config.schema import ConfigError, preset
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.one_step import OneStepDelay
from dsx.method.method import Method, SettingWarning
from dsx.method.outer_optimizer import Nesterov, OuterContext, OuterOptimizer
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.staleness import GapPenalty


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("dreamddp", {"schedule": Layerwise(5, when="later")}, r"schedule.when='later'"),  # type: ignore[arg-type]
        ("cocodc", {"schedule": AdaptiveTransmission(9, norm="max")}, r"schedule.norm='max'"),  # type: ignore[arg-type]
        ("cocodc", {"delay": DelayCompensation(2, mode="dcasgd")}, r"delay.mode='dcasgd'"),  # type: ignore[arg-type]
        ("co2", {"delay": OneStepDelay("locl")}, r"first_round='locl'.*'restart', 'local'"),  # type: ignore[arg-type]
        ("co2", {"staleness": GapPenalty("elements")}, r"granularity='elements'"),  # type: ignore[arg-type]
        (
            "diloco",
            {"outer_optimizer": Nesterov(0.7, 0.9, clip=3.0, clip_unit="RMS")},  # type: ignore[arg-type]
            r"clip_unit='RMS' is not known; allowed: 'absolute', 'rms'",
        ),
    ],
)
def test_choices_are_checked_without_a_schema(name: str, change: dict[str, Any], said: str) -> None:
    method: Method = replace(preset(name), **change)
    with pytest.raises(ValueError, match=said):
        method.validate()


@pytest.mark.parametrize(
    ("name", "overrides", "said"),
    [
        ("dreamddp", {"schedule": {"type": "adaptive", "interval": 9}}, r"use\s.*'streaming'"),
        (
            "dreamddp",
            {
                "schedule": {"type": "periodic", "interval": 9},
                "control": {"type": "adaptive_rank", "rank": 4},
            },
            r"use control.type='fixed'",
        ),
        ("dreamddp", {"staleness": {"type": "gap"}}, r"leave staleness out"),
        (
            "eager",
            {"outer_optimizer": {"type": "momentum", "lr": 1, "momentum": 0, "scale_by_lr": True}},
            r"which scale_by_lr does not allow",
        ),
        (
            "cocodc",
            {
                "schedule": {"step_seconds": 1.0, "transfer_seconds": 20.0},
                "control": {"type": "adaptive_rank", "rank": 8},
            },
            r"control.min_interval=8 lets H fall to where.*use interval >= 80; or raise",
        ),
        (
            "streaming_diloco",
            {"fragments": {"num_fragments": 12}, "control": {"type": "adaptive_rank", "rank": 8}},
            r"control.min_interval=8 lets H fall to where.*does not fit",
        ),
    ],
)  # fmt: skip
def test_what_cannot_go_together_is_refused(
    name: str, overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        preset(name, **overrides)


@pytest.mark.parametrize("preset_name", ["eager", "dilocox"])
def test_a_share_that_is_known_after_the_mean_is_no_look_ahead(preset_name: str) -> None:
    more: dict[str, Any] = {"delay": {"type": "eager"}, "compression": {"type": "low_rank"}}
    if preset_name == "eager":
        more["compression"]["rank"] = 4
    with pytest.raises(
        ConfigError, match=r"type='low_rank'.*use compression.type='dense', 'quantized', 'random_"
    ):
        preset(preset_name, **more)
    preset(preset_name, **more | {"delay": {"type": "one_step"}})


def test_more_fragments_than_the_lowest_h_go_with_a_periodic_schedule() -> None:
    preset("dilocox", fragments={"num_fragments": 12}).validate(num_fragments=12)


def test_a_preset_is_for_one_cluster_or_more() -> None:
    with pytest.raises(ConfigError, match=r"num_clusters=0 must be .* at least 1"):
        preset("diloco", 0)


@dataclass(frozen=True)
class Mine(Nesterov):
    """A rule derived from one that ships, and not registered."""


@dataclass(frozen=True)
class Signs(OuterOptimizer):
    """A rule of which nothing is known."""

    lr: float

    def validate(self) -> None:
        """Accept everything."""

    def update(self, grad: Tensor, slots: Mapping[str, Tensor], context: OuterContext) -> Tensor:
        return grad.sign_().mul_(self.lr)


def test_outer_optimizers_from_elsewhere_are_warned_of_by_what_they_say() -> None:
    method = replace(preset("diloco_delayed"), outer_optimizer=Mine(lr=2.0, momentum=0.9))
    with pytest.warns(SettingWarning, match=r"outer_optimizer.lr=2 with nesterov and momentum 0.9"):
        method.validate(num_clusters=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replace(method, outer_optimizer=Signs(lr=2.0)).validate(num_clusters=2, num_steps=1)


def test_a_rule_of_which_nothing_is_known_is_not_split() -> None:
    method = replace(preset("eager"), outer_optimizer=Signs(lr=2.0))
    with pytest.raises(ValueError, match=r"which Signs \(nonlinear_by\) does not allow"):
        method.validate()
    replace(method, outer_optimizer=Mine(lr=0.1, momentum=0.5)).validate()
