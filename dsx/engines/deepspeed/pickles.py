"""DeepSpeed's files are Python pickles, which can run code; what may be read is looked over first.

What dsx reads itself it reads with torch's `weights_only`, which runs none. DeepSpeed reads without
it (to resume, to convert), so the names in a pickle are compared before, unread, with those that
torch allows, those of numpy's arrays and of a script's arguments, which hold values only, and the
few classes that DeepSpeed 0.19 writes.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

_OF_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
}
_MAKERS: dict[str, Any] = {
    "_reconstruct": np.zeros(1).__reduce__()[0], "scalar": np.float64(0).__reduce__()[0]
}  # fmt: skip
_PLAIN: list[Any] = [
    argparse.Namespace, np.ndarray, np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["All"]},
    *((make, f"numpy.{core}.multiarray.{name}") for name, make in _MAKERS.items()
      for core in ("core", "_core")),
]  # fmt: skip


def read_pickle(path: Path) -> dict[str, Any]:
    """Return what a file of tensors and plain values holds; ValueError names what else is in it."""
    try:
        with safe_globals(_PLAIN):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(find_code([path]) or f"{path} cannot be read: {error}") from None


def find_code(paths: Iterable[Path]) -> str | None:
    """Say which of the files names what may run code when it is read; None if none does."""
    for path in paths:
        try:
            with safe_globals(_PLAIN):
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
