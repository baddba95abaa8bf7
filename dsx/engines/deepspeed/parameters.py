"""What a DeepSpeed engine trains: parameters, their shapes, and the optimizer that steps them."""

from __future__ import annotations

from typing import Any


def trained_parameters(engine: Any) -> dict[str, Any]:
    """Return the parameters that the optimizer trains, by name.

    Frozen ones are not among them; ValueError if some are not the model's.
    """
    wrapper = engine.optimizer
    for attribute in ("bit16_groups", "bf16_groups", "fp16_groups"):
        if hasattr(wrapper, attribute):
            groups = getattr(wrapper, attribute)
            break
    else:
        groups = [group["params"] for group in wrapper.param_groups]
    held = {id(p) for group in groups for p in group if p.requires_grad}
    trained = {name: p for name, p in engine.module.named_parameters() if id(p) in held}
    if len(trained) != len(held):
        raise ValueError(
            f"the optimizer trains {len(held)} parameters, {len(trained)} of them in the model: "
            "give the engine a module that has them all, or they would differ between clusters"
        )
    return trained


def stepping_optimizer(engine: Any) -> Any:
    """Return the optimizer whose step changes the masters: what a wrapper wraps, if there is one.

    Mostly `engine.basic_optimizer`, but some wrappers replace Adagrad by their own.
    """
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def whole_shape(parameter: Any) -> tuple[int, ...]:
    """Return the shape of all of a parameter, also where ZeRO-3 has taken it apart."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def is_expert(parameter: Any) -> bool:
    """Whether it is of an expert: DeepSpeed reduces its gradients over fewer ranks."""
    return not getattr(parameter, "allreduce", True)


def is_slice(parameter: Any) -> bool:
    """Whether AutoTP has cut it: another part lies on every rank of its tensor-parallel group."""
    return bool(getattr(parameter, "tensor_model_parallel", False))
