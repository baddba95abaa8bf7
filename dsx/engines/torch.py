"""Plain PyTorch as the inner engine: any `torch.optim.Optimizer` over fp32 parameters, or several.

The parameters are their own masters, unless an optimizer keeps others beside weights of fewer bits
(masters_apart.py). The clock is the optimizers' public step hook: an inner step is over when each
of them has stepped once. So a `GradScaler` that skips a step must say so with
`Handle.skip_inner_step`, or the clusters' clocks drift apart.

A layerwise schedule with `when="after"` takes the optimizer's step layer by layer inside the
backward, so nothing a script does to gradients after `backward()` has any effect: no GradScaler,
no clipping of the global norm there (see schedule/layerwise.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from dsx.core.buffers import Buffers
from dsx.core.engine import ClusterRanks
from dsx.core.recorder import ComputeRecorder
from dsx.core.types import BackwardTrigger, Stage
from dsx.engines.backward_hooks import BackwardWatch
from dsx.engines.cluster_collectives import OneRank
from dsx.engines.compute_trace import ComputeWatch
from dsx.engines.data_parallel import bare_parameters
from dsx.engines.distributed_adam import find_masters_apart
from dsx.engines.masters import Masters, MastersAdapter, Piece
from dsx.engines.masters_apart import counts_steps_of_groups, refuse_quantized
from dsx.engines.untrained import Untrained
from dsx.method.fragments import Fragmenter

Optimizers = Optimizer | Sequence[Optimizer]
_HOOKS = "_optimizer_step_post_hooks"
_attached: Any = WeakIdKeyDictionary()  # parameters whose optimizers call a handle


class Hook(Protocol):
    """What torch returns for a hook."""

    def remove(self) -> None:
        """Take it off."""
        ...


class TorchAdapter(MastersAdapter):
    """A module and its optimizers in one process; this rank owns every parameter whole."""

    ranks: ClusterRanks

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        fragmenter: Fragmenter,
        backwards: int = 1,
        keeps_state_on_host: bool = False,
    ) -> None:
        self._optimizers = as_list(optimizers)
        named = bare_parameters(model)
        parameters = held_parameters(named, self._optimizers)
        self._apart = find_masters_apart(parameters, self._optimizers)
        self._names = {id(p): name for name, p in named.items()}
        self._untrained = Untrained(named.items(), parameters.values())
        shapes = self._apart.shapes(parameters)
        assignment = fragmenter.assign(shapes)
        pieces = self._locate(parameters, assignment)
        self._model = model
        wholes = [dict.fromkeys(map(self._apart.whole_of, names)) for names in assignment]
        self._members = [[parameters[name] for name in names] for names in wholes]
        self._backwards = backwards
        self._watch: BackwardWatch | None = None
        self._stepped: set[int] = set()  # optimizers, in this inner step
        self._is_stepping_fragment = False  # whether what optimizers step is a part of an inner one
        self._hooks: list[Hook] = self._apart.follow_loads()
        self.stage = Stage()
        device = next(iter(parameters.values())).device
        self._hold(Masters(shapes, assignment, pieces), device, keeps_state_on_host)

    def _locate(
        self, parameters: Mapping[str, nn.Parameter], assignment: Sequence[Sequence[str]]
    ) -> Mapping[str, Piece]:
        """Return what of the parameters this rank serves, and note with whom it shares them."""
        self.ranks = OneRank()
        return {name: self._apart.piece(p) for name, p in parameters.items()}

    def read(self, fragment: int, out: Tensor, start: int = 0) -> None:
        """Copy the masters of a fragment from `start` on into `out`, in place."""
        self._apart.look_over()
        super().read(fragment, out, start)

    def in_a_row(self, fragment: int, start: int, stop: int) -> Tensor | None:
        """Return live masters that outer steps may be taken in, None where they lie elsewhere."""
        self._apart.look_over()
        return super().in_a_row(fragment, start, stop)

    def write_part(self, fragment: int, source: Tensor, start: int) -> None:
        """Overwrite the masters of a fragment from `start` on, in place."""
        self._apart.look_over()
        super().write_part(fragment, source, start)

    def end_write(self, fragment: int) -> None:
        """Make weights anew of the fragment's masters, where those are apart."""
        super().end_write(fragment)
        self._apart.write_weights(self._members[fragment])

    @property
    def buffer_bytes(self) -> int:
        """Return 0: nothing is gathered."""
        return 0

    @property
    def buffers(self) -> Buffers:
        """Return buffers that give nothing."""
        return Buffers()

    def sync_model_weights(self) -> None:
        """Nothing to do: the parameters are the masters, or were written with them."""

    def inner_lr(self) -> float:
        """Return the rate of the first parameter group, of the first optimizer."""
        return float(self._optimizers[0].param_groups[0]["lr"])

    @property
    def model(self) -> nn.Module:
        """Return what is trained, as it was attached."""
        return self._model

    @property
    def inner_optimizers(self) -> list[Optimizer]:
        """What steps the parameters."""
        return self._optimizers

    def on_inner_step(self, callback: Callable[[bool], object]) -> None:
        """Call back after every inner step, with whether it left all parameters alone.

        Each optimizer steps once in it. A fused one is called by a `GradScaler` for a step to be
        skipped, too, and told so.
        """

        def follow(index: int) -> Callable[[Optimizer, Any, Any], None]:
            def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
                is_part = self.ignores_steps or self._is_stepping_fragment
                if not is_part and self._take_note(index):
                    callback(all(_was_skipped(o) for o in self._optimizers))
                    self.end_inner_step()

            return after_step

        for index, optimizer in enumerate(self._optimizers):
            hook: Any = torch.compiler.disable(follow(index))  # of a compiled step, too
            self._hooks.append(optimizer.register_step_post_hook(hook))
        _attached.update({p: self._names[id(p)] for p in self._parameters})

    def _take_note(self, index: int) -> bool:
        """Note that an optimizer has stepped; return whether all have."""
        if index in self._stepped:
            waited = next(i for i in range(len(self._optimizers)) if i not in self._stepped)
            raise RuntimeError(
                f"optimizer {index} ({type(self._optimizers[index]).__name__}) has stepped twice "
                f"and optimizer {waited} ({type(self._optimizers[waited]).__name__}) not at all: "
                "step each attached optimizer once per inner step, and call "
                "handle.skip_inner_step() behind the last one where a GradScaler has skipped one"
            )
        self._stepped.add(index)
        return len(self._stepped) == len(self._optimizers)

    def trace_compute(self, trace: ComputeRecorder) -> None:
        """Record forward, backward and the optimizers' steps."""
        watch = ComputeWatch(trace)
        self._hooks += watch.follow(self._model)

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watch.begin_step()

        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watch.end_step()

        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(before_step))
            self._hooks.append(optimizer.register_step_post_hook(after_step))

    def end_inner_step(self) -> None:
        """Forget this step's gradients; to be called where `on_inner_step` is not used."""
        self._stepped.clear()
        if self._watch is not None:
            self._watch.begin_step()
        self._untrained.require_frozen()

    def detach(self) -> None:
        """Take every hook off the model and the optimizers, which may be attached again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for parameter in self._parameters:
            _attached.pop(parameter, None)

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back with a fragment inside the backward, stepped by then if `when="after"`."""

        for optimizer in self._optimizers if when == "after" else ():
            if _needs_closure(optimizer):
                raise ValueError(
                    f"schedule.when='after' steps each layer inside the backward, which "
                    f"{type(optimizer).__name__} cannot do: its step() needs a closure; use "
                    "schedule.when='before'"
                )
            if counts_steps_of_groups(optimizer):
                raise ValueError(
                    f"schedule.when='after' steps each layer by itself, and "
                    f"{type(optimizer).__name__} of {type(optimizer).__module__} would count each "
                    "as a step of all: use schedule.when='before'"
                )

        def on_complete(fragment: int) -> None:
            if when == "after":
                self._step_fragment(fragment)
            callback(fragment)

        self._watch = BackwardWatch(
            [self._model], self._members, lambda: self._backwards, on_complete
        )
        self._hooks += self._watch.hooks

    def backward_seconds(self, fragment: int) -> float | None:
        """Return the time between this fragment's gradients and those before them, last time."""
        return self._watch.seconds[fragment] if self._watch is not None else None

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for members in self._members for parameter in members]

    def _step_fragment(self, fragment: int) -> None:
        """Take the optimizers' step for one fragment alone.

        Optimizers pass over parameters without a gradient: the others' are set aside meanwhile,
        and this fragment's are dropped, so that the step at the end passes over it in turn.
        """
        own = {id(p) for p in self._members[fragment]}
        held = [(o, [p for g in o.param_groups for p in g["params"]]) for o in self._optimizers]
        others = [(p, p.grad) for _, params in held for p in params if id(p) not in own]
        for parameter, _ in others:
            parameter.grad = None
        self._is_stepping_fragment = True
        try:
            for optimizer, params in held:
                if any(id(p) in own for p in params):
                    optimizer.step()
        finally:
            self._is_stepping_fragment = False
            for parameter, gradient in others:
                parameter.grad = gradient
        for parameter in self._members[fragment]:
            parameter.grad = None


def as_list(optimizers: Optimizers) -> list[Optimizer]:
    """Return one optimizer, or several, as a list; TypeError for what is no torch optimizer."""
    found: list[Any] = [*optimizers] if isinstance(optimizers, (list, tuple)) else [optimizers]
    for optimizer in found:
        # wrappers such as Accelerate's have the type, and none of its hooks
        if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, _HOOKS):
            raise TypeError(
                f"{type(optimizer).__name__} has not the step hooks of a torch.optim.Optimizer, "
                "which are dsx's clock: pass the optimizer that it wraps, or a list of several"
            )
    return found


def held_parameters(
    named: Mapping[str, nn.Parameter], optimizers: Sequence[Optimizer]
) -> Mapping[str, nn.Parameter]:
    """Return what the optimizers hold, by name, in the model's order; ValueError if not served."""
    names = {id(p): name for name, p in named.items()}
    holders: dict[int, Optimizer] = {}
    for optimizer in optimizers:
        for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
            other = holders.setdefault(id(parameter), optimizer)
            if other is not optimizer:
                raise ValueError(
                    f"parameter {names.get(id(parameter), '')} is held by two optimizers "
                    f"({type(other).__name__} and {type(optimizer).__name__}), which would both "
                    "step it: leave it out of one"
                )
    parameters = {n: p for n, p in named.items() if id(p) in holders}
    for name, parameter in parameters.items():
        refuse_quantized(name, parameter)
    if len(parameters) != len(holders) or not holders:
        raise ValueError(
            f"the optimizer holds {len(holders)} parameters, {len(parameters)} of them in "
            "the model: attach the model that the optimizer trains"
        )
    apart = find_masters_apart(parameters, optimizers)
    for name, parameter in parameters.items():
        if parameter.dtype != torch.float32 and parameter not in apart:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: the outer step needs fp32 masters; "
                "keep the parameters in fp32 and use torch.autocast, an optimizer that keeps them "
                "(docs/accelerators.md), or train with DeepSpeed"
            )
        if not parameter.is_contiguous():
            raise ValueError(f"parameter {name} is not contiguous; call .contiguous() on it")
    return parameters


def require_unattached(parameters: Iterable[nn.Parameter]) -> None:
    """Raise ValueError if another handle averages these parameters: it would do so twice."""
    for parameter in parameters:
        if parameter in _attached:
            raise ValueError(
                f"parameter {_attached[parameter]} has a dsx handle already: attach a model "
                "once, or close() its handle before it is attached again"
            )


def _was_skipped(optimizer: Optimizer) -> bool:
    """Whether a fused optimizer's step just taken has left its parameters alone."""
    found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
    return found_inf is not None and bool(found_inf.item())


def _needs_closure(optimizer: Optimizer) -> bool:
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
