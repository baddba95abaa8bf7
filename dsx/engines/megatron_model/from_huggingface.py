"""A folder of Hugging Face as a model of Megatron's: the table of parts.py, read backwards.

Weights are made one at a time, of those that lie in the folder's safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dsx.checkpoint.weight_files import INDEX
from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.from_config import notes_of_config, unread
from dsx.engines.megatron_model.parts import Match

CONFIG = "config.json"
_TIED_HEAD = "lm_head.weight"


def is_huggingface_folder(path: Path) -> bool:
    """Whether a path is a folder that transformers loads."""
    return (path / CONFIG).is_file()


@dataclass(frozen=True)
class _Weight:
    shape: tuple[int, ...]
    match: Match


class HuggingFaceFolder:
    """The weights of a folder under Megatron's names, and the notes of the model they make.

    `unread` are keys of its config.json that dsx does not know.
    ValueError for a model that dsx does not know as one of Megatron's, and for weights that the
    folder lacks, has beside those, or in another shape.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.notes = notes_of_config(folder / CONFIG)
        family = family_of(self.notes, folder)
        self.kind = family.kind
        self.unread = unread(folder / CONFIG, family.config)
        self._files = _files(folder)
        self.parameters: dict[str, _Weight] = {}
        wanted: dict[str, tuple[int, ...]] = {}
        for match in family.matches(()):
            parts = [torch.empty(shape, device="meta") for shape in match.targets.values()]
            self.parameters[match.source] = _Weight(tuple(match.join(parts).shape), match)
            wanted |= match.targets
        self._require(wanted)

    def tensor(self, name: str) -> Tensor:
        """Return one weight, fp32."""
        match = self.parameters[name].match
        return match.join([self._read(target) for target in match.targets])

    def _read(self, name: str) -> Tensor:
        stored, path = self._files[name]
        with safe_open(path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored)
            return tensor.float()

    def _require(self, wanted: Mapping[str, tuple[int, ...]]) -> None:
        lacking = sorted(wanted.keys() - self._files.keys())
        if lacking:
            raise ValueError(
                f"{self._folder} lacks {lacking[0]} and {len(lacking) - 1} more weights of a "
                f"{self.kind}: give a folder that save_pretrained wrote"
            )
        beside = sorted(self._files.keys() - wanted.keys())
        if self.notes.is_tied:
            beside = [name for name in beside if name != _TIED_HEAD]
        if beside:
            raise ValueError(
                f"{self._folder} holds {beside[0]} and {len(beside) - 1} more weights that a "
                f"{self.kind} of Megatron does not have"
            )
        with ExitStack() as stack:
            opened: dict[Path, Any] = {}
            for name, shape in wanted.items():
                stored, path = self._files[name]
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt"))
                found = tuple(opened[path].get_slice(stored).get_shape())
                if found != shape:
                    raise ValueError(
                        f"{path}: {name} is {list(found)}, and {self._folder / CONFIG} makes it "
                        f"{list(shape)}"
                    )


def _files(folder: Path) -> dict[str, tuple[str, Path]]:
    """Return to every weight its name in a file, and the file.

    GPT-2's may lie there without `transformer.`, and beside masks, which are no weights.
    """
    index = folder / INDEX
    if index.is_file():
        table: Any = json.loads(index.read_text())["weight_map"]
        found = {name: (name, folder / file) for name, file in table.items()}
    else:
        path = folder / "model.safetensors"
        if not path.is_file():
            raise ValueError(
                f"{folder} holds neither model.safetensors nor {INDEX}: let "
                "model.save_pretrained(DIR) write it"
            )
        with safe_open(path, framework="pt") as file:
            found = {name: (name, path) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    bare = "wte.weight" in found
    return {
        f"transformer.{name}" if bare and name != _TIED_HEAD else name: place
        for name, place in found.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }
