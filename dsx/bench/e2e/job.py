"""What one run of `dsx bench e2e` does: the model, its batches, and the job that a worker reads."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_HEAD_SIZE = 32
_WINDOWS_BY_RATIO = 4096  # a batch of 128 at ratio 32: 1 Mbit/s on a core that takes 0.25 s for it
_MOST_WINDOWS = 512
SomeJob = TypeVar("SomeJob", bound="Job")
Mode = Literal["ceiling", "data_parallel", "dsx", "peer"]  # peer: of another library


@dataclass(frozen=True)
class Shape:
    """The model and its batches, per cluster."""

    num_layers: int = 4
    hidden_size: int = 64
    sequence_length: int = 64
    batch_size: int = 32
    vocab_size: int = 257

    @classmethod
    def for_ratio(cls, ratio: float) -> Shape:
        """Return batches in inverse proportion to a ratio, of 1 to 512 windows.

        Within these all ratios have about the same line. It is slow, about 1 Mbit/s, so that
        sending takes little of a core that also computes.
        """
        return cls(batch_size=min(max(1, round(_WINDOWS_BY_RATIO / ratio)), _MOST_WINDOWS))

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read "layers,hidden,length,batch"; ValueError for anything else."""
        try:
            numbers = [int(part) for part in text.split(",")]
            shape = cls(*numbers)
        except (TypeError, ValueError):
            numbers, shape = [], cls()
        if len(numbers) != 4 or min(numbers) < 1 or shape.hidden_size % _HEAD_SIZE:
            raise ValueError(
                f"shape={text!r} must be LAYERS,HIDDEN,LENGTH,BATCH with HIDDEN a multiple of "
                f"{_HEAD_SIZE}; try 4,64,64,32"
            )
        return shape

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.num_layers},{self.hidden_size},{self.sequence_length},{self.batch_size}"

    @property
    def tokens_per_step(self) -> int:
        """Of one cluster."""
        return self.batch_size * self.sequence_length


@dataclass(frozen=True)
class Job:
    """What one run does; `config` is a DeepSpeed JSON, `validation_windows` a number of them.

    Steps without communication for `ceiling_seconds` come before and after every `steps_per_block`.
    """

    mode: Mode
    config: dict[str, Any]
    shape: Shape
    steps: int
    steps_per_block: int
    num_clusters: int
    data: str
    directory: str
    deadline_seconds: float
    ceiling_seconds: float
    seed: int = 0
    validation_windows: int = 128

    def write(self) -> Path:
        """Write the job into its directory, which is emptied."""
        shutil.rmtree(self.directory, ignore_errors=True)
        Path(self.directory).mkdir(parents=True)
        path = Path(self.directory) / "job.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path

    @classmethod
    def read(cls: type[SomeJob], path: Path) -> SomeJob:
        """Read what `write` has written."""
        values: dict[str, Any] = json.loads(path.read_text())
        shape = Shape(**values.pop("shape"))
        return cls(shape=shape, **values)


class TinyGPT(nn.Module):
    """A decoder of torch's own layers; layers are `layers.<i>`, so fragments find them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        size = shape.hidden_size
        self.embedding = nn.Embedding(shape.vocab_size, size)
        self.positions = nn.Parameter(torch.randn(shape.sequence_length, size) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size, size // _HEAD_SIZE, 4 * size, 0.0, "gelu", batch_first=True, norm_first=True
            )
            for _ in range(shape.num_layers)
        )
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, shape.vocab_size, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(shape.sequence_length)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy, nats per token, of int64 `[batch, length]`."""
        x = self.embedding(tokens) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build_model(shape: Shape, seed: int) -> TinyGPT:
    """Return the model with the weights that `seed` gives."""
    torch.manual_seed(seed)
    return TinyGPT(shape)
