"""Weights that are written one at a time are those that safetensors reads, in little memory."""

from __future__ import annotations

import json
import os
import re
import struct
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dsx.checkpoint.weight_files import INDEX, save_streamed, write_safetensors

TENSORS = {
    "b.weight": torch.arange(6.0).reshape(2, 3),
    "a.count": torch.tensor([1, 2, 3]),
    "c.flags": torch.tensor([True, False, True]),
    "a.scale": torch.tensor(2.5),
    "d.half": torch.tensor([0.1, 0.2, 0.3]).bfloat16(),
    "e.none": torch.empty(0, 4),
}


def stream(path: Path, tensors: dict[str, Tensor]) -> None:
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    save_streamed(path, forms, tensors.__getitem__, {"format": "pt", "z": "b.weight"})


def test_a_file_is_what_safetensors_itself_writes(tmp_path: Path) -> None:
    stream(tmp_path / "ours", TENSORS)
    found = load_file(tmp_path / "ours")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].equal(tensor), name
    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"format": "pt", "z": "b.weight"}
    in_order = dict(sorted({n: t for n, t in TENSORS.items() if t.dtype == torch.float32}.items()))
    stream(tmp_path / "ours", in_order)
    save_file(in_order, tmp_path / "theirs", {"format": "pt", "z": "b.weight"})
    ours, theirs = ((tmp_path / name).read_bytes() for name in ("ours", "theirs"))
    (length,) = struct.unpack("<Q", ours[:8])
    assert len(ours) == len(theirs) and ours[8 + length :] == theirs[8 + length :]
    assert json.loads(ours[8 : 8 + length]) == json.loads(theirs[8 : 8 + length])


def test_what_is_converted_and_what_is_refused(tmp_path: Path) -> None:
    form = {"a": (torch.bfloat16, (2,))}
    save_streamed(tmp_path / "x", form, lambda name: torch.tensor([0.1, 0.2]), {})
    assert load_file(tmp_path / "x")["a"].equal(torch.tensor([0.1, 0.2]).bfloat16())
    with pytest.raises(ValueError, match=r"a is \[3\], and was told as \[2\]"):
        save_streamed(tmp_path / "x", form, lambda name: torch.zeros(3), {})
    with pytest.raises(ValueError, match="a is of type torch.complex64, .* it holds torch.float64"):
        save_streamed(tmp_path / "x", {"a": (torch.complex64, (2,))}, lambda name: Tensor(), {})


@dataclass
class Shape:
    shape: tuple[int, ...]


@dataclass
class Made:
    """Weights that are made when they are asked for, and count what the process holds then."""

    parameters: dict[str, Shape]
    aliases: dict[str, str] = field(default_factory=dict[str, str])
    copies: dict[str, str] = field(default_factory=dict[str, str])
    held: list[int] = field(default_factory=list[int])

    def tensor(self, name: str) -> Tensor:
        made = torch.full(self.parameters[name].shape, float(len(self.held)))
        self.held.append(anonymous_bytes())
        return made


def anonymous_bytes() -> int:
    """Memory of this process that is no file's."""
    (found,) = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found) * 1024


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_memory_is_that_of_one_tensor_whatever_a_file_holds(tmp_path: Path) -> None:
    count, numel = 24, 2_000_000  # 8 MB each, above what malloc keeps to itself
    model = Made({f"layers.{i}.weight": Shape((2, numel // 2)) for i in range(count)})
    before = anonymous_bytes()
    write_safetensors(model, {}, tmp_path, torch.float32, 10**12, lambda line: None)
    assert max(model.held) - before < 6 * 4 * numel  # two, and what malloc keeps
    assert not (tmp_path / INDEX).exists()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        last = file.get_slice(f"layers.{count - 1}.weight")
        assert last.get_shape() == [2, numel // 2] and last[1, -1] == count - 1
