"""Frameworks over `deepspeed.initialize` whose loops are not served: refused before they train.

They divide data, stop, evaluate and save in ways of their own, each cluster by itself; attached to
an engine alone, they would read the same data everywhere, and wait for each other in vain.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dsx.run.session import ROUTES, RouteNotTaken


def refuse_accelerate(module: ModuleType) -> None:
    """Let `Accelerator.prepare` refuse to make a DeepSpeed engine."""

    def _prepare_deepspeed(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refusal("Accelerator.prepare() with DeepSpeed")

    cls: Any = module.Accelerator
    cls._prepare_deepspeed = _prepare_deepspeed


def refuse_lightning(module: ModuleType) -> None:
    """Let Lightning's strategy refuse to start."""

    def setup_environment(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _refusal("Lightning's DeepSpeedStrategy")

    cls: Any = module.DeepSpeedStrategy
    cls.setup_environment = setup_environment


def _refusal(what: str) -> RouteNotTaken:
    return RouteNotTaken(f"{what} is not served by dsx.run; it serves {ROUTES}")
