"""Losses and tokens for progress lines and figures, seen where a script does not tell them.

A language model's tokens are the ids that its forward is given in training, on this rank, times the
ranks of the cluster that read samples of their own; a loss is what an engine's backward is given.
Nothing is read from a device but every some seconds, and nothing goes into the records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from dsx.telemetry.progress import Progress


def see_tokens(progress: Progress, model: nn.Module, num_readers: int) -> None:
    """Count what a model is given, on a rank that tells of it."""
    if not progress.watches:
        return

    def count(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            given = kwargs if "input_ids" in kwargs else args
            progress.see(tokens=num_readers * count_ids(given))

    hook: Any = torch.compiler.disable(count)
    model.register_forward_pre_hook(hook, with_kwargs=True)


def see_losses(progress: Progress, engine: Any) -> None:
    """Look at what an engine's backward is given."""
    if not progress.watches:
        return
    original = engine.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        see_loss(progress, kwargs.get("loss", args[0] if args else None))
        return original(*args, **kwargs)

    engine.backward = backward


def see_loss(progress: Progress, loss: Any) -> None:
    """Take a loss of one number, as a script computes it."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        progress.see(loss=loss.detach())


def count_ids(given: Any) -> int:
    """Return how many token ids a batch has: `input_ids`, or what comes first, if it is of ids."""
    if isinstance(given, Mapping):
        return count_ids(cast("Mapping[str, Any]", given).get("input_ids"))
    if isinstance(given, (list, tuple)):
        parts = cast("Sequence[Any]", given)
        return count_ids(parts[0]) if parts else 0
    is_ids = isinstance(given, torch.Tensor) and given.dtype in (torch.int64, torch.int32)
    return given.numel() if is_ids and given.ndim == 2 else 0
