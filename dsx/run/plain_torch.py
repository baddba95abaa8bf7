"""A training loop in plain PyTorch: its model is attached as its first step begins.

A script makes a model and optimizers, wraps the model in DistributedDataParallel or shards it by
`fully_shard`, and calls it. With the first call that trains, all of them are there: the outermost
module that is called, and the optimizers that hold its parameters. At the script's end the model
holds the clusters' average.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

import dsx
from dsx.comm.world import current_world
from dsx.config.checkpoints import refuse_of_script
from dsx.run.session import RouteNotTaken, Session
from dsx.training.handle import Handle

_FRAMEWORKS = ("lightning", "pytorch_lightning")  # attached, or refused, by rooms of their own


def attach_plain_torch(session: Session) -> None:
    """Attach the first model that this process trains, unless another route has attached one."""
    loop = _PlainLoop(session)
    original: Any = Optimizer.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        loop.made.append(weakref.ref(self))

    Optimizer.__init__ = __init__
    first: Any = torch.compiler.disable(loop.before_forward)
    loop.watch = register_module_forward_pre_hook(first)


class _PlainLoop:
    """The optimizers of a script, in the order in which they were made, and what is attached."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.made: list[weakref.ref[Optimizer]] = []
        self.watch: Any = None
        self._known: dict[int, Optimizer] = {}  # optimizers of what is attached, by their ids
        self._attached: set[int] = set()  # ids of its parameters

    def before_forward(self, module: nn.Module, args: Any) -> None:
        """Attach the module that is called, if this is where its training begins."""
        if self._session.has_engine:
            self.watch.remove()
            return
        if current_world() is None or not module.training or not torch.is_grad_enabled():
            return
        own = {id(parameter) for parameter in module.parameters()}
        optimizers = [o for o in self._optimizers() if _held(o) & own]
        if not optimizers or _is_of_framework(module):
            return  # watch_first_step refuses what nobody attaches
        steppers = without_containers(optimizers)
        _require_whole(module, own, steppers)
        self.watch.remove()
        self._known = {id(optimizer): optimizer for optimizer in optimizers}
        self._attached = own.union(*map(_held, optimizers))
        self._attach(module, steppers)

    def _attach(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        session = self._session
        session.divides_data = True
        refuse_of_script(dsx.load_config(session.config_with_block({})).checkpoints)
        handle: Handle = dsx.attach(module, optimizers, config=session.config_with_block({}))
        session.handles.append(handle)
        session.keeping_average.append(handle)
        end: Any = handle.preemption.engine
        end.without_callback = "it goes on from what the script itself has saved last, if it does"
        register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Refuse what would train beside the model that is attached."""
        if id(optimizer) in self._known:
            return
        if self._is_around_known(optimizer):
            self._known[id(optimizer)] = optimizer
            return
        step = f"{type(optimizer).__name__}.step()"
        if _held(optimizer) & self._attached:
            raise RouteNotTaken(
                f"the script trains with a second optimizer of the attached model, {step}, which "
                "was not there as training began: its steps would not be counted, and the clusters "
                "would exchange nothing. Make all optimizers before the first step, or begin anew "
                "with the first (optimizer.state.clear()); a script that trains in stages calls "
                "dsx.attach(model, optimizer, config=...) for each, and handle.close() behind it"
            )
        raise RouteNotTaken(
            f"the script trains a second model, with {step}, and only "
            "the first one is attached: it would differ between the clusters. Of plain PyTorch "
            "dsx.run serves one model; a script with several calls dsx.attach for each itself"
        )

    def _is_around_known(self, optimizer: Optimizer) -> bool:
        """Whether it holds one that trains what is attached, itself or in what it holds."""
        seen: dict[int, Optimizer] = {}
        left = [optimizer]
        while left:
            one = left.pop()
            if id(one) in self._known:
                return True
            if id(one) not in seen:
                seen[id(one)] = one
                left += _held_objects(one)
        return False

    def _optimizers(self) -> list[Optimizer]:
        there = (made() for made in self.made)
        return [optimizer for optimizer in there if optimizer is not None]


def _require_whole(module: nn.Module, own: set[int], optimizers: Iterable[Optimizer]) -> None:
    """Raise RouteNotTaken where what is called first is a part of what an optimizer trains."""
    for optimizer in optimizers:
        if outside := len(_held(optimizer) - own):
            raise RouteNotTaken(
                f"the script trains with {type(optimizer).__name__}, and the first module that it "
                f"calls in training, {type(module).__name__}, lacks {outside} of the parameters "
                "that it steps. dsx.run attaches the module that is called first: let the script "
                "call the model (what wraps it) as a whole, and not a part of it, or call "
                "dsx.attach(model, optimizer, config=...) itself"
            )


def without_containers(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return those that step parameters themselves, not one that calls others of them.

    A container holds the optimizers that it calls as its own attribute, or in a list or dict of it.
    """
    given = list(optimizers)
    ids = {id(optimizer) for optimizer in given}
    return [one for one in given if not any(id(o) in ids for o in _held_objects(one))]


def _held_objects(optimizer: Optimizer) -> list[Any]:
    found: list[Any] = []
    for value in vars(optimizer).values():
        if isinstance(value, dict):
            found += value.values()  # pyright: ignore[reportUnknownArgumentType]
        found += value if isinstance(value, (list, tuple)) else [value]
    return [one for one in found if isinstance(one, Optimizer)]


def _held(optimizer: Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _is_of_framework(module: nn.Module) -> bool:
    """Whether Lightning has made the module, or Accelerate is in use, which divide data, too."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is not None and accelerate.is_initialized():
        return True
    kinds = {cls.__module__.partition(".")[0] for m in module.modules() for cls in type(m).__mro__}
    return any(name in kinds for name in _FRAMEWORKS)
