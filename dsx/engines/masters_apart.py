"""fp32 masters that an optimizer keeps beside weights of fewer bits, by the optimizers' real types.

apex's FusedAdam with `master_weights` (`optimizers/fused_adam.py` there: `param_groups_master`, one
for each parameter, of which the kernel makes fp16 weights) and Transformer Engine's
(`pytorch/optimizers/fused_adam.py`: `state[p]["master_param"]`, made at the first step). What these
optimizers step without their masters, or from masters that are not fp32, is refused. Masters that
apex parts among ranks are in distributed_adam.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsx.core.types import ParameterShape
from dsx.engines.masters import Piece, dtype_name

Find = Callable[[], Tensor]
_APEX, _ENGINE = "apex", "transformer_engine"
_HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ApartPiece(Piece):
    """What of a parameter this rank serves, in a master that is looked up at every access.

    A state that is loaded puts another tensor in its place. `master` is the parameter.
    """

    find: Find | None = None

    def flat(self) -> Tensor:
        """Return the elements of the master, in a row."""
        assert self.find is not None, "made by ApartMasters"
        return self.find().detach().view(-1)


class ApartMasters:
    """The masters of parameters that are not their own; ValueError for what is not served."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
    ) -> None:
        names = {id(p): name for name, p in parameters.items()}
        self._held: dict[int, tuple[str, nn.Parameter, Find]] = {}
        for optimizer in optimizers:
            for place, group in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(group["params"]):
                    name = names.get(id(parameter))
                    find = name and _find_master(optimizer, place, index, parameter, name)
                    if name and find:
                        self._held[id(parameter)] = name, parameter, find
        self._optimizers = optimizers
        self._is_looked_over = False

    def __bool__(self) -> bool:
        """Whether any parameter has one."""
        return bool(self._held)

    def __contains__(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter has a master apart from it."""
        return id(parameter) in self._held

    def piece(self, parameter: nn.Parameter) -> Piece:
        """Return all of a parameter, where its master is."""
        shape = tuple(parameter.shape)
        if parameter not in self:
            return Piece(parameter, shape)
        return ApartPiece(parameter, shape, find=self._held[id(parameter)][2])

    def shapes(self, parameters: Mapping[str, nn.Parameter]) -> list[ParameterShape]:
        """Return what dsx takes for parameters, in their order: those of the model."""
        return [ParameterShape(n, tuple(p.shape), dtype_name(p)) for n, p in parameters.items()]

    def whole_of(self, name: str) -> str:
        """Return the name of the model's parameter that one of `shapes` is of: its own."""
        return name

    def follow_loads(self) -> list[Any]:
        """Look masters over again behind every state that is loaded; return the hooks."""
        if not self:
            return []
        return [o.register_load_state_dict_post_hook(self._look_again) for o in self._optimizers]

    def look_over(self) -> None:
        """Require weights to be their masters, rounded; once, and after a state was loaded.

        ValueError where they are not: one of both was loaded, and the other was not.
        """
        if self._is_looked_over:
            return
        for name, parameter, weight, rounded in self._rounded():
            if not any(map(partial(_are_equal, weight), rounded)):
                raise ValueError(
                    f"parameter {name} ({dtype_name(parameter)}) is not what its optimizer's fp32 "
                    "master rounds to: weights were loaded without it. Load weights before the "
                    "optimizer is made, and its masters with its state (docs/accelerators.md)"
                )
        self._is_looked_over = True

    def write_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make weights of these parameters anew from their masters, where those are apart."""
        with torch.no_grad():
            for parameter in parameters:
                if parameter in self:
                    parameter.copy_(self._held[id(parameter)][2]())

    def _rounded(self) -> Iterator[tuple[str, nn.Parameter, Tensor, list[Tensor]]]:
        """Yield each parameter, its weights here, and what they may be by their masters."""
        for name, parameter, find in self._held.values():
            yield name, parameter, parameter.detach(), [find().to(parameter.dtype)]

    def _look_again(self, optimizer: Optimizer) -> None:
        self._is_looked_over = False


def refuse_quantized(name: str, parameter: Tensor) -> None:
    """Raise ValueError for a parameter that Transformer Engine keeps in codes (`fp8_model_init`).

    Such a tensor says that it is bf16 or fp32, and its elements are copies of what it holds.
    """
    kinds = [c.__name__ for c in type(parameter).__mro__ if _is_of(c, _ENGINE)]
    if kinds:
        raise ValueError(
            f"parameter {name} is a {kinds[0]} of Transformer Engine, whose values are codes: an "
            "outer step needs fp32 masters; leave out fp8_model_init (quantized_model_init), fp8 "
            "inside of layers (fp8_autocast) is no matter"
        )


def is_of_apex(optimizer: Optimizer, name: str) -> bool:
    """Whether an optimizer is one of apex's that have this in their name."""
    return any(_is_of(c, _APEX) and name in c.__name__ for c in type(optimizer).__mro__)


def counts_steps_of_groups(optimizer: Optimizer) -> bool:
    """Whether an optimizer counts a group's steps, not a parameter's: it steps all of it at once.

    Those of apex and of Transformer Engine do.
    """
    return any(_is_of(c, _APEX) or _is_of(c, _ENGINE) for c in type(optimizer).__mro__)


def _find_master(
    optimizer: Optimizer, place: int, index: int, parameter: nn.Parameter, name: str
) -> Find | None:
    """Return where the master of a parameter is found; None where it is the parameter."""
    kind, own = type(optimizer), dtype_name(parameter)
    held: Any = optimizer
    if is_of_apex(optimizer, "Distributed"):
        raise ValueError(
            f"apex's {kind.__name__} parts masters and state among ranks by itself, which dsx does "
            "not follow: use apex.optimizers.FusedAdam under DistributedDataParallel, or ZeRO-1 of "
            "DeepSpeed"
        )
    if getattr(held, "reduced_precision_dtype", None) is not None and counts_steps_of_groups(held):
        raise ValueError(
            f"{kind.__name__}(reduced_precision_dtype=...) steps copies of its own, which dsx does "
            "not follow: leave it out and use torch.autocast"
        )
    if not counts_steps_of_groups(optimizer) or not getattr(held, "master_weights", False):
        return None
    if parameter.dtype not in _HALVES:
        raise ValueError(
            f"parameter {name} is {own}, and {kind.__name__}(master_weights=True) keeps a second "
            "copy of it: leave master_weights out, or keep the parameter in 16 bits"
        )
    if hasattr(held, "param_groups_master"):  # apex's, and that of Transformer Engine before 2.0
        if parameter.dtype == torch.bfloat16:
            raise ValueError(
                f"parameter {name} is bfloat16, which this {kind.__name__} steps without its "
                "master: use the FusedAdam of Transformer Engine 2, fp16, or fp32 with "
                "torch.autocast"
            )
        return lambda: held.param_groups_master[place]["params"][index]
    kept = getattr(held, "master_weight_dtype", torch.float32)
    if kept != torch.float32 or getattr(held, "store_param_remainders", False):
        what = "store_param_remainders=True" if kept == torch.float32 else "master_weight_dtype"
        raise ValueError(
            f"{kind.__name__}({what}) keeps masters that are not fp32 tensors, which an outer step "
            "needs: leave it out"
        )
    return lambda: engines_master(held, parameter)


def engines_master(optimizer: Any, parameter: Tensor, has_remainders: bool = False) -> Tensor:
    """Return Transformer Engine's master of a parameter, made now if no step has been taken.

    `has_remainders`: it is to be what 16 bits lack (`store_param_remainders`).
    """
    state = optimizer.state[parameter]
    if "master_param" not in state:
        takes = len(inspect.signature(optimizer.initialize_state).parameters) > 1
        optimizer.initialize_state(parameter, *([has_remainders] if takes else []))
    return optimizer.state[parameter]["master_param"]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def _is_of(kind: type, package: str) -> bool:
    return kind.__module__.split(".")[0] == package
