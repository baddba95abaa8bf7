"""What `dsx export` does with its options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.averaged_model import DTYPES, SavedModel, find_model, write_safetensors
from dsx.checkpoint.of_run import find_saved
from dsx.engines.deepspeed.files import read_untrained, write_universal

FORMATS = ("safetensors", "universal")


@dataclass(frozen=True)
class ExportOptions:
    """The command line; sizes in GB."""

    path: Path
    out: Path
    format: str
    tag: str | None
    dtype: str
    max_shard_size: float

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"--format {self.format} must be one of {', '.join(FORMATS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} must be one of {', '.join(DTYPES)}")
        if self.format == "universal" and self.dtype != "fp32":
            raise ValueError(
                f"--dtype {self.dtype}: a universal checkpoint holds fp32; leave it out"
            )


def export_checkpoint(options: ExportOptions, tell: Callable[[str], None]) -> None:
    """Write the averaged model and tell what was written; see `dsx export --help`."""
    saved = find_saved(options.path, options.tag)
    model = find_model(saved.base, saved.tag)
    _require_whole(model)
    what = f"mean of {model.num_saved_clusters} clusters" if model.is_mean else "anchor"
    tell(f"{model.directory}: {what} at step {model.step}, {model.numel:,} trained elements")
    if model.is_second_best:
        tell(
            f"averaged() would be the mean of {model.num_saved_clusters} clusters, not all of "
            f"which are in {saved.base}: this is the anchor, which they share"
        )
    if model.in_flight:
        tell(f"left out: {model.in_flight} transfer(s) that were in flight")
    untrained = read_untrained(model)
    if options.format == "universal":
        tell(f"converting with DeepSpeed to {options.out / model.directory.name} ...")
        files = [
            f for f in write_universal(model, untrained, options.out).rglob("*") if f.is_file()
        ]
    else:
        files = write_safetensors(
            model,
            untrained,
            options.out,
            DTYPES[options.dtype],
            int(options.max_shard_size * 1e9),
            tell,
        )
    size = sum(file.stat().st_size for file in files)
    tell(f"wrote {len(files)} file(s), {size:,} bytes, to {options.out}")


def _require_whole(model: SavedModel) -> None:
    """Refuse slices of tensor parallelism, which nobody could load as they are."""
    slices = [name for name in model.parameters if re.search(r"\.slice_\d+$", name)]
    if slices:
        raise ValueError(
            f"{model.directory} holds {slices[0]} and {len(slices) - 1} more slices of "
            "tensor-parallel weights, which dsx export does not join: convert Megatron's own "
            "checkpoint of this iteration, which holds the averaged model after finish()"
        )
