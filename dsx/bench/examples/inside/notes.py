"""What one rank has trained on, and the weights that it has at its end, as a JSON file.

A sample is a row of what the first module without children is given first in a forward of the
model, in training: of a language model the token ids, of others the values themselves.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


class Notes:
    """Of this rank: hashes of samples in the order of training, and the model that was trained."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._samples: list[str] = []
        self._outer: list[nn.Module] = []  # whose forward is under way
        self._model: nn.Module | None = None
        self._first: nn.Module | None = None
        self._is_noted = False  # of the outermost forward

    def begin_forward(self, module: nn.Module, args: Any) -> None:
        """Note the samples, if this is the module that sees them first."""
        self._is_noted = self._is_noted and bool(self._outer)
        self._outer.append(module)
        if self._is_noted or not (module.training and torch.is_grad_enabled() and args):
            return
        if self._first is None and not list(module.children()):
            self._first, self._model = module, self._outer[0]
        if module is self._first and isinstance(args[0], torch.Tensor):
            self._is_noted = True
            self._samples += [_hash(row) for row in args[0].detach()]

    def end_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget a module whose forward is over, and what an exception has left within it."""
        while self._outer and self._outer.pop() is not module:
            pass

    def write(self) -> None:
        """Write them, at the end of the process."""
        weights = hashlib.sha256()
        elements = 0
        for parameter in self._model.parameters() if self._model is not None else ():
            held = _held(parameter)
            elements += held.numel()
            weights.update(_hash(held).encode())
        content = {
            "samples": self._samples,
            "weights": weights.hexdigest() if elements else "",
            "elements": elements,
            "model": type(self._model).__name__,
        }
        self._file.write_text(json.dumps(content))


def take() -> None:
    """Begin to take notes in this process."""
    notes = Notes(Path(os.environ["EXAMPLES_NOTES"]) / f"rank_{os.environ['RANK']}.json")
    register_module_forward_pre_hook(notes.begin_forward)
    register_module_forward_hook(notes.end_forward, always_call=True)
    atexit.register(notes.write)


def _held(parameter: Any) -> torch.Tensor:
    """Return what lies on this rank of a parameter, whoever has sharded it."""
    parameter = getattr(parameter, "ds_tensor", parameter)  # ZeRO-3
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return local.detach()


def _hash(x: torch.Tensor) -> str:
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:24]
