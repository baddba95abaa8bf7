"""A method as the line sees it: what leaves when, how it is coded, when it is waited for.

Plain numbers, so that a plan needs neither tensors nor torch. `settings_of` reads them off a
`Method`; `payload.py` says what they send, `timeline.py` when.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, cast

if TYPE_CHECKING:
    from dsx.method.method import Method

ScheduleName = Literal["every_step", "periodic", "streaming", "adaptive", "layerwise"]
CodingName = Literal["dense", "quantized", "low_rank", "top_k"]


@dataclass(frozen=True)
class Coding:
    """The keys of `compression` that decide what is sent and what coding costs.

    `rank` is the one a controller starts from, where there is one, and `max_rank` its limit; a
    matrix travels in factors if it allows `least_rank`.
    """

    type: CodingName = "dense"
    wire: str = "int4"
    group_size: int = 64
    mean_wire: str = "int8"
    small_wire: str = "bf16"
    error_feedback: str = "none"
    rank: int | None = None
    max_rank: int = 0
    least_rank: int = 4
    factor_wire: str = "int8"
    dense_rounds: int = 0
    full_round_every: int | None = None
    min_saving: float = 1.3
    exclude: tuple[str, ...] = ()
    k: int = 64
    chunk: int = 4096


@dataclass(frozen=True)
class Notes:
    """How many numbers travel beside a transfer, for decisions (notes.py)."""

    per_tensor: int = 0
    per_element: int = 0
    by_cluster: int = 0
    of_owner: int = 0


@dataclass(frozen=True)
class Settings:
    """What decides bytes and waits; `data_parallel` is the only one that is no dsx method.

    A transfer is applied `overlap_steps` steps after its launch, or, where `rounds_late` is above
    0, right after the launch so many rounds later.
    """

    schedule: ScheduleName
    interval: int
    overlap_steps: int = 0
    rounds_late: int = 0
    gamma: float = 0.4
    step_seconds: float | None = None
    transfer_seconds: float | None = None
    layer_backward_seconds: tuple[float, ...] | None = None
    layer_transfer_seconds: tuple[float, ...] | None = None
    coding: Coding = field(default_factory=Coding)
    notes: Notes = field(default_factory=Notes)

    def at(self, interval: int) -> Settings:
        """Return the same at another H."""
        return replace(self, interval=interval)


DATA_PARALLEL = Settings("every_step", 1)


def settings_of(method: Method) -> Settings:
    """Return what a resolved method means for the line."""
    from dsx.config.schema import AXES

    names = {
        axis: next(n for n, kind in choices.items() if type(getattr(method, axis)) is kind)
        for axis, (_, choices) in AXES.items()
    }
    schedule, staleness = method.schedule, method.staleness
    is_elementwise = getattr(staleness, "granularity", "tensor") != "tensor"
    has_times = names["schedule"] == "layerwise"
    times: dict[str, Any] = {
        ("layer_" if has_times else "") + key: getattr(schedule, key, None)
        for key in ("step_seconds", "backward_seconds", "transfer_seconds")
    }
    return Settings(
        schedule=cast(ScheduleName, names["schedule"]),
        interval=schedule.interval,
        overlap_steps=method.delay.steps,
        rounds_late=method.delay.rounds_under_way,
        gamma=getattr(schedule, "gamma", 0.4),
        coding=_coding(names["compression"], method),
        notes=Notes(
            per_tensor=int(staleness.is_active and not is_elementwise),
            per_element=int(staleness.is_active and is_elementwise),
            by_cluster=3 if method.uses_seconds else 0,
            of_owner=method.control.sideband_numel(method.sync_params) + schedule.uses_norms,
        ),
        **{key: value for key, value in times.items() if value is not None},
    )


def _coding(name: str, method: Method) -> Coding:
    from dsx.core.types import History

    compression, control = method.compression, method.control
    given: dict[str, Any] = {
        f.name: getattr(compression, f.name, f.default) for f in fields(Coding)
    }
    own = getattr(compression, "rank", None)
    rank = control.sync_params(method.sync_params, History(0)).rank or own
    given |= {"type": name, "rank": rank, "max_rank": control.largest_rank or rank or 0}
    given["least_rank"] = own or 4
    return Coding(**given)
