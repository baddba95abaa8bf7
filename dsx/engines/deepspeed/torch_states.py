"""What a torch optimizer has saved, taken into DeepSpeed's: masters, moments, groups, counters.

`torch.optim.Optimizer.state_dict()` numbers parameters by their place in its groups. DeepSpeed
flattens each group, and keeps on a rank what it steps there. So a state is cut as the master is,
and nothing of it is rounded. Checked with DeepSpeed 0.19 without ZeRO and with its stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.engines.deepspeed.masters import locate
from dsx.engines.deepspeed.parameters import stepping_optimizer, trained_parameters
from dsx.engines.deepspeed.synchronous import loaded_of
from dsx.engines.masters import Piece
from dsx.engines.same_beginning import begin_alike
from dsx.training.handle import Handle

_SAME = "train with the same optimizer, in the same groups, as the run that has saved it"
_STEP = "step"
_NOT_OF_OPTIMIZER = {"params", "param_names", "initial_lr"}


def begin_from_torch(
    engine: Any,
    handle: Handle,
    weights: Mapping[str, Tensor],
    saved: Mapping[str, Any],
    step: int,
    source: Path,
) -> None:
    """Begin outer training from a plain run's weights and optimizer. Collective over all clusters.

    `weights` are those of all trained parameters, `saved` the optimizer's `state_dict()`.
    ValueError for states that are not of this engine's parameters and optimizer.
    """
    if handle.step or engine.global_steps:
        raise ValueError(f"{source} is of a run without dsx: load it before the first step")
    _require_served(engine, source)
    parameters = trained_parameters(engine)
    place, optimizer = locate(engine), stepping_optimizer(engine)
    numbers = _numbers(engine, parameters, saved, source)
    pieces = place.pieces(parameters)
    for name, piece in pieces.items():
        piece.view().copy_(_cut(weights[name], piece))
    states = {name: saved["state"].get(number, {}) for name, number in numbers.items()}
    _take_states(optimizer, pieces, states)
    groups = [group for group in saved["param_groups"] if group["params"]]
    for group, old in zip(_groups_of(optimizer), groups, strict=True):
        group.update({k: v for k, v in old.items() if k != "params" and k in group})
    engine.global_steps = step
    engine.global_samples = step * engine.train_batch_size()
    engine.micro_steps = step * engine.gradient_accumulation_steps()
    place.sync_model_weights()
    begin_alike(handle, loaded_of(engine), str(source))


def _require_served(engine: Any, source: Path) -> None:
    if engine.zero_optimization_stage() == 3:
        raise ValueError(
            f"{source} was saved without DeepSpeed, and its states are not taken apart for "
            "zero_optimization.stage=3: use stage 0, 1 or 2"
        )
    if engine.lr_scheduler is not None:
        raise ValueError(
            f"{source} was saved without DeepSpeed, and its schedule is not of the kind that this "
            'run\'s JSON has: leave "scheduler" out of it, and the Trainer makes its own'
        )


def _numbers(
    engine: Any, parameters: Mapping[str, Any], saved: Mapping[str, Any], source: Path
) -> dict[str, int]:
    """Return the number of every parameter in the saved optimizer; ValueError for other groups."""
    names = {id(p): name for name, p in parameters.items()}
    own = [[names[id(p)] for p in group if p.requires_grad] for group in _client_groups(engine)]
    own = [group for group in own if group]
    groups = [group["params"] for group in saved["param_groups"] if group["params"]]
    sizes, others = [len(group) for group in own], [len(group) for group in groups]
    if sizes != others:
        raise ValueError(
            f"{source} holds an optimizer whose groups have {others} parameters, and this run's "
            f"have {sizes}: {_SAME}"
        )
    numbers = {n: i for g, h in zip(own, groups, strict=True) for n, i in zip(g, h, strict=True)}
    settings = set(_groups_of(stepping_optimizer(engine))[0]) | _NOT_OF_OPTIMIZER
    if unknown := sorted({key for group in saved["param_groups"] for key in group} - settings):
        raise ValueError(
            f"{source} holds an optimizer with the settings {unknown}, which this run's "
            f"{type(stepping_optimizer(engine)).__name__} does not know: {_SAME}"
        )
    for name, number in numbers.items():
        shape = list(parameters[name].shape)
        for key, value in saved["state"].get(number, {}).items():
            held = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
            if key != _STEP and held != shape:
                raise ValueError(
                    f"{source} holds {key} of {name} as {held}, and the parameter is {shape}: "
                    f"{_SAME}"
                )
    _require_states(engine, own, {n: saved["state"].get(i, {}) for n, i in numbers.items()}, source)
    return numbers


def _require_states(
    engine: Any,
    own: Sequence[Sequence[str]],
    states: Mapping[str, Mapping[str, Any]],
    source: Path,
) -> None:
    """Raise ValueError for states that another optimizer would keep, or of unequal steps.

    By group and not by what a rank holds of it, so that all ranks raise it.
    """
    optimizer = stepping_optimizer(engine)
    for group, names in zip(_groups_of(optimizer), own, strict=True):
        kept = {key for p in group["params"] for key in optimizer.state.get(p, {})} - {_STEP}
        for name in names:
            tensors = set(states[name]) - {_STEP}
            if not tensors or (kept and kept != tensors):
                raise ValueError(
                    f"{source} holds {sorted(tensors) or 'no state'} of {name}, and this run's "
                    f"{type(optimizer).__name__} keeps {sorted(kept)}: {_SAME}"
                )
        steps = {float(states[name].get(_STEP, 0)) for name in names}
        is_flat = len(group["params"]) < len(names)
        if len(steps) > 1 and (is_flat or _STEP in group):
            raise ValueError(
                f"{source} holds parameters of one group that have been stepped differently often "
                f"({sorted(steps)}), and DeepSpeed steps a group as one: begin from the weights "
                "alone (--model_name_or_path)"
            )


def _client_groups(engine: Any) -> Sequence[Sequence[Any]]:
    """Return the parameters as the optimizer was given them, before anything was flattened."""
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(engine.optimizer, attribute):
            return getattr(engine.optimizer, attribute)
    return [group["params"] for group in engine.optimizer.param_groups]


def _groups_of(optimizer: Any) -> list[dict[str, Any]]:
    return [group for group in optimizer.param_groups if group["params"]]


def _take_states(
    optimizer: Any, pieces: Mapping[str, Piece], states: Mapping[str, Mapping[str, Any]]
) -> None:
    """Copy what lies in this rank's masters."""
    for name, piece in pieces.items():
        state, own = states[name], optimizer.state[piece.master]
        tensors = {k: v for k, v in state.items() if k != _STEP}
        for key, value in tensors.items():
            if key not in own:
                own[key] = torch.zeros_like(piece.master.detach())
            replace(piece, master=own[key]).view().copy_(_cut(value, piece))
        if _STEP in state:
            _set_step(optimizer, own, piece.master, state[_STEP])


def _set_step(optimizer: Any, own: dict[str, Any], master: Tensor, step: Any) -> None:
    """Set the number of steps where the optimizer keeps it: by parameter, or by group."""
    group = next(g for g in optimizer.param_groups if any(p is master for p in g["params"]))
    if _STEP in group:
        group[_STEP] = int(step)
    elif isinstance(own.get(_STEP), (int, float)):
        own[_STEP] = int(step)
    else:
        own[_STEP] = torch.as_tensor(step).detach().clone()


def _cut(whole: Tensor, piece: Piece) -> Tensor:
    return whole.detach().reshape(-1)[piece.start : piece.start + piece.numel]
