"""Which engines train in this bench, and what is known of each before it is imported."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dsx.bench.chaos.job import EngineName

ZERO_STAGES = range(4)


@dataclass(frozen=True)
class Served:
    """`package` has to be there, which the extra of the engine's name installs; torch always is.

    `samples_per_step` of a cluster, by the number of its ranks; `is_dealt`: whether others read
    what a lost cluster has left of its samples.
    """

    package: str | None
    ranks: Callable[[int], bool]
    ranks_allowed: str
    samples_per_step: Callable[[int], int]
    is_dealt: bool = True


SERVED: Mapping[EngineName, Served] = {
    "torch": Served(None, lambda n: True, "any", lambda n: 1),
    "deepspeed": Served("deepspeed", lambda n: True, "any", lambda n: n),
    "megatron": Served(
        "megatron.core", lambda n: n in (1, 2, 4, 8), "1, 2, 4 or 8 (tensor parallel)",
        lambda n: 1, is_dealt=False,
    ),
}  # fmt: skip


def require_served(engine: EngineName, num_ranks: int, zero_stage: int | None) -> None:
    """Raise ValueError for an engine that cannot train here so, by its name."""
    served = SERVED[engine]
    if served.package is not None and not _is_there(served.package):
        raise ValueError(
            f"--engine {engine} needs {served.package}, which is not installed: pip install "
            f'"dsx-train[{engine}]", or take --engine torch'
        )
    if not served.ranks(num_ranks):
        raise ValueError(
            f"--ranks {num_ranks} is not served with --engine {engine}; it takes "
            f"{served.ranks_allowed}"
        )
    if zero_stage is not None and engine != "deepspeed":
        raise ValueError(f"--zero {zero_stage} is for --engine deepspeed, and this is {engine}")
    if zero_stage is not None and zero_stage not in ZERO_STAGES:
        raise ValueError(f"--zero {zero_stage} is no ZeRO stage; it takes 0, 1, 2 or 3")


def _is_there(package: str) -> bool:
    """Whether a package can be imported; of what it is in, everything is looked at but itself."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
