"""Frameworks over `deepspeed.initialize` whose loops are not served: refused before they train.

They divide data, stop, evaluate and save in ways of their own, each cluster by itself; attached to
an engine alone, they would read the same data everywhere, and wait for each other in vain.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from dsx.run.session import ROUTES, RouteNotTaken, Session


def refuse_accelerate(session: Session, module: ModuleType) -> None:
    """Let `Accelerator.prepare` refuse to make a DeepSpeed engine, but for a Trainer's."""
    cls: Any = module.Accelerator
    original = cls._prepare_deepspeed

    def _prepare_deepspeed(self: Any, *args: Any, **kwargs: Any) -> Any:
        trains = any(hasattr(one, "param_groups") or _is_stand_in(one) for one in args)
        if not trains or any(trainer.accelerator is self for trainer in session.trainers):
            return original(self, *args, **kwargs)
        raise _refusal("Accelerator.prepare() with DeepSpeed in a loop of the script's own")

    cls._prepare_deepspeed = _prepare_deepspeed


def _is_stand_in(one: Any) -> bool:
    """Whether it is accelerate's word for the optimizer that the DeepSpeed config names."""
    return type(one).__name__ == "DummyOptim"


def _refusal(what: str) -> RouteNotTaken:
    return RouteNotTaken(f"{what} is not served by dsx.run; it serves {ROUTES}")
