"""What one run of `dsx bench wall-clock` does: the GPT, DeepSpeed's JSON, the points to score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsx.bench.e2e.job import Job, Shape
from dsx.examples.gpt import GPT, GPTConfig

HEAD_SIZE = 32
Inner = Literal["muon", "adamw"]
INNERS: tuple[Inner, ...] = ("muon", "adamw")
_WARM_UP_SHARE, _FINAL_RATE = 0.05, 0.01


@dataclass(frozen=True)
class TrainingJob(Job):
    """A job whose weights are written after `snapshot_steps` and at its end.

    With `most_seconds` it ends with the first step that comes later.
    """

    rate: float = 0.01
    inner: Inner = "muon"
    snapshot_steps: Sequence[int] = ()
    most_seconds: float | None = None


def build_gpt(shape: Shape, seed: int) -> GPT:
    """Return the model of README's tables with the weights that `seed` gives."""
    size = shape.hidden_size
    config = GPTConfig(
        shape.num_layers, size, size // HEAD_SIZE, shape.sequence_length, shape.vocab_size
    )
    return GPT(config, seed)


def deepspeed_json(batch_size: int, steps: int) -> dict[str, Any]:
    """Return the JSON of every run of so many steps: warm-up, then a cosine to near 0."""
    schedule = {
        "total_num_steps": steps,
        "warmup_num_steps": max(2, round(_WARM_UP_SHARE * steps)),
        "warmup_type": "linear",
        "cos_min_ratio": _FINAL_RATE,
    }
    return {
        "train_micro_batch_size_per_gpu": batch_size,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "scheduler": {"type": "WarmupCosineLR", "params": schedule},
        "steps_per_print": 10**9,
    }
