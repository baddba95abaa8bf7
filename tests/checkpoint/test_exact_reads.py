"""What is read of a safetensors file is what was asked for; what is no such file is refused."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsx.checkpoint.exact_reads import TensorFile

MB = 1 << 20


def write(path: Path) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(4 * MB), "b": torch.randn(3, 5), "c": torch.randn(4 * MB),
        "half": torch.randn(7).bfloat16(), "codes": torch.arange(9, dtype=torch.uint8),
        "whole": torch.tensor(3), "none": torch.zeros(0),
    }  # fmt: skip
    save_file(tensors, path, {"dsx": "told"})
    return tensors


def bytes_in_memory(path: Path) -> int:
    """What the system holds of a file, read by whomever."""
    size = path.stat().st_size
    held = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as mapped:
        place = np.frombuffer(mapped, np.uint8)
        address, length = ctypes.c_void_p(place.ctypes.data), ctypes.c_size_t(size)
        assert ctypes.CDLL(None).mincore(address, length, held) == 0
        del place
    return sum(page & 1 for page in held) * mmap.PAGESIZE


def forget(path: Path) -> None:
    """Have the system let go of it; skips where it cannot, as in memory itself."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if bytes_in_memory(path):
        pytest.skip(f"the file system of {path.parent} keeps what it holds in memory")


def test_it_reads_what_safetensors_does(tmp_path: Path) -> None:
    tensors = write(tmp_path / "file")
    file, theirs = TensorFile(tmp_path / "file"), load_file(tmp_path / "file")
    assert {*file.names} == {*tensors} and file.metadata == {"dsx": "told"}
    for name, tensor in tensors.items():
        found = file.read(name)
        assert found.dtype == tensor.dtype and file.shape(name) == tuple(tensor.shape)
        assert torch.equal(found, theirs[name])
        for start, stop in ((0, 0), (1, 3), (2, 99), (5, 2)) if tensor.dim() else ():
            assert torch.equal(file.read(name, start, stop), tensor[start:stop])
    (tmp_path / "file").unlink()
    assert torch.equal(file.read("c"), tensors["c"])  # as it was opened


def test_nothing_around_is_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    tensors = write(path)
    forget(path)
    file = TensorFile(path)
    assert bytes_in_memory(path) <= 4 * mmap.PAGESIZE
    parts = [(name, start, start + MB // 4) for name in "ac" for start in (MB, 3 * MB)]
    for name, start, stop in parts:
        assert torch.equal(file.read(name, start, stop), tensors[name][start:stop])
    asked = sum(4 * (stop - start) for _, start, stop in parts)
    assert asked <= bytes_in_memory(path) <= 1.1 * asked


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("cut", r"tensors of [\d,]+ bytes, and [\d,]+ in the file: not whole"),
        ("longer", r"tensors of [\d,]+ bytes, and [\d,]+ in the file: not whole"),
        ("short", r"a header of [\d,]+ bytes does not lie in a file of 5: not whole"),
        ("gap", "tensors do not lie one behind another"),
        ("dtype", "its header is none of safetensors"),
        ("list", "its header is none of safetensors"),
    ],
)
def test_what_is_not_whole_is_refused(what: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    entry |= {"gap": {"data_offsets": [4, 12]}, "dtype": {"dtype": "F3"}}.get(what, {})
    text = json.dumps([1] if what == "list" else {"x": entry}).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(8)
    path.write_bytes(
        {"cut": whole[:-1], "longer": whole + b"x", "short": whole[:5]}.get(what, whole)
    )
    with pytest.raises(ValueError, match=said):
        TensorFile(path)
