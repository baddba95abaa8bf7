"""DeepSpeed's files are Python pickles, which can run code; what may be read is looked over first.

What dsx reads itself it reads with torch's `weights_only`, which runs none. DeepSpeed reads without
it (to resume, to convert), so the names in a pickle are compared before, unread, with those that
torch allows and the few classes that DeepSpeed 0.19 writes.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}


def read_pickle(path: Path) -> dict[str, Any]:
    """Return what a file of tensors and plain values holds; ValueError names what else is in it."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(find_code([path]) or f"{path} cannot be read: {error}") from None


def find_code(paths: Iterable[Path]) -> str | None:
    """Say which of the files names what may run code when it is read; None if none does."""
    for path in paths:
        try:
            names = set(get_unsafe_globals_in_checkpoint(path)) - _OF_DEEPSPEED
        except (RuntimeError, ValueError, pickle.UnpicklingError) as error:
            return f"{path} cannot be read: {error}"
        if names:
            return (
                f"{path} holds {', '.join(sorted(names))}, which may run code when it is read: if "
                "the checkpoint is your own, keep plain values and tensors in client_state, or "
                "call torch.serialization.add_safe_globals with the class before loading"
            )
    return None
