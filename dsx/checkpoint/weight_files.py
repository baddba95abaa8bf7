"""A model's weights as Hugging Face's safetensors: one tensor at a time, so that a host needs
memory for the largest of them, whatever a file holds.

The form is that of safetensors: eight bytes with the length of a JSON header, the header (type,
shape and place of every tensor), and their bytes without gaps. Tensors of wider types come first,
as in files that safetensors itself writes, so that each lies at a multiple of its width; those of
one type are in the order in which they are given.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dsx.core.progress import SOON, Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INDEX = "model.safetensors.index.json"
Tell = Callable[[str], None]
NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_ALIGNMENT = 8  # bytes, of the header's end


class HasShape(Protocol):
    """What is known of a parameter before it is read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        ...


class Weights(Protocol):
    """A model whose tensors are made when they are asked for."""

    @property
    def parameters(self) -> Mapping[str, HasShape]:
        """The parameters by name, in the model's order."""
        ...

    @property
    def aliases(self) -> Mapping[str, str]:
        """To every further name of a shared parameter the one that it is under."""
        ...

    @property
    def copies(self) -> Mapping[str, str]:
        """Further names that only a file's metadata tells of, each with the one it is under."""
        ...

    def tensor(self, name: str) -> Tensor:
        """Return one parameter, fp32."""
        ...


def write_safetensors(
    model: Weights,
    untrained: Mapping[str, Tensor],
    out: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    tell: Tell,
    left_out: Collection[str] = (),
) -> list[Path]:
    """Write the model as Hugging Face does, and return the files.

    One `model.safetensors`, or numbered ones of up to `shard_bytes` with an index. Names of
    shared tensors that are `left_out` are not written.
    """
    known = {*model.parameters, *model.aliases}
    extra = {name: t for name, t in untrained.items() if name not in known}
    forms = {name: (dtype, tuple(p.shape)) for name, p in model.parameters.items()}
    forms |= {name: (_dtype_of(t, dtype), tuple(t.shape)) for name, t in extra.items()}
    for name, source in model.aliases.items():
        if source in forms:
            forms[name] = forms[source]
    forms = {name: form for name, form in forms.items() if name not in left_out}
    sizes = {name: _bytes_of(form) for name, form in forms.items()}
    shards = list(_shards(sizes, shard_bytes))
    out.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    weight_map: dict[str, str] = {}
    progress = Progress(f"weights for {out}", sum(sizes.values()), True, first_seconds=SOON)

    def read(name: str) -> Tensor:
        source = model.aliases.get(name, name)
        tensor = extra[source] if source in extra else model.tensor(source)
        progress.moved(sizes[name])
        return tensor

    for index, names in enumerate(shards, start=1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{index:05d}-of-{len(shards):05d}.safetensors"
        copies = {place: name for place, name in model.copies.items() if name in names}
        save_streamed(out / file, {n: forms[n] for n in names}, read, {"format": "pt", **copies})
        tell(f"{file}: {len(names)} tensors, {sum(sizes[n] for n in names):,} bytes")
        weight_map.update(dict.fromkeys(names, file))
        files.append(out / file)
    if len(shards) > 1:
        contents = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        files.append(out / INDEX)
        files[-1].write_text(json.dumps(contents, indent=2) + "\n")
    return files


def save_streamed(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    read: Callable[[str], Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write one safetensors file of tensors of these types and shapes, read one after another.

    What `read` returns is converted to the type that is told for it. ValueError for a type that
    safetensors has no name for, or a tensor of another shape than was told.
    """
    names = sorted(forms, key=lambda name: -forms[name][0].itemsize)
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        dtype, shape = forms[name]
        if dtype not in NAMES:
            raise ValueError(
                f"{name} is of type {dtype}, which a safetensors file of dsx does not hold; it "
                f"holds {', '.join(str(known) for known in NAMES)}"
            )
        begin, end = end, end + _bytes_of(forms[name])
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name in names:
            dtype, shape = forms[name]
            tensor = read(name).to(dtype).contiguous()
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} is {list(tensor.shape)}, and was told as {list(shape)}")
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next is read


def _bytes_of(form: tuple[torch.dtype, tuple[int, ...]]) -> int:
    return math.prod(form[1]) * form[0].itemsize


def _dtype_of(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Return the type to write a tensor in: only floating point follows the option."""
    return dtype if tensor.is_floating_point() else tensor.dtype


def _shards(sizes: Mapping[str, int], largest: int) -> Iterator[list[str]]:
    """Yield names in order, as many at a time as fit; one that does not fit at all comes alone."""
    names: list[str] = []
    used = 0
    for name, size in sizes.items():
        if names and used + size > largest:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    if names:
        yield names
