"""What `dsx export` does with its options."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel, bare_model, find_model
from dsx.checkpoint.of_run import find_saved
from dsx.checkpoint.weight_files import DTYPES, write_safetensors
from dsx.engines.deepspeed.files import read_untrained, write_universal
from dsx.engines.hf_folder.folder import FolderOptions, write_folder

FORMATS = ("safetensors", "universal")


@dataclass(frozen=True)
class ExportOptions:
    """The command line; sizes in GB. Of `out` and `hf`, the Hugging Face folder, one is given."""

    path: Path
    out: Path | None
    format: str
    tag: str | None
    dtype: str
    max_shard_size: float
    hf: Path | None = None
    config: Path | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if (self.out is None) == (self.hf is None):
            raise ValueError(
                "give one of --out DIR, for the weights, and --hf DIR, for a folder that Hugging "
                "Face's transformers loads"
            )
        if self.hf is None and (self.config or self.tokenizer):
            given = "--config" if self.config else "--tokenizer"
            raise ValueError(f"{given} goes with --hf DIR: give that in the place of --out")
        if self.format not in FORMATS:
            raise ValueError(f"--format {self.format} must be one of {', '.join(FORMATS)}")
        if self.hf is not None and self.format != "safetensors":
            raise ValueError(
                f"--format {self.format} goes with --out DIR: give that in the place of --hf, or "
                "leave it out"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype} must be one of {', '.join(DTYPES)}")
        if self.format == "universal" and self.dtype != "fp32":
            raise ValueError(
                f"--dtype {self.dtype}: a universal checkpoint holds fp32; leave it out"
            )

    @property
    def shard_bytes(self) -> int:
        """The most that a file of weights holds."""
        return int(self.max_shard_size * 1e9)


def export_checkpoint(options: ExportOptions, tell: Callable[[str], None]) -> None:
    """Write the averaged model and tell what was written; see `dsx export --help`."""
    folder = _folder_options(options)
    saved = find_saved(options.path, options.tag)
    model = bare_model(saved.base) if saved.is_bare else find_model(saved.base, saved.tag)
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
    files = _write(model, untrained, options, folder, tell)
    size = sum(file.stat().st_size for file in files)
    tell(f"wrote {len(files)} file(s), {size:,} bytes, to {options.hf or options.out}")


def _write(
    model: SavedModel,
    untrained: Mapping[str, Tensor],
    options: ExportOptions,
    folder: FolderOptions | None,
    tell: Callable[[str], None],
) -> list[Path]:
    """Write the model in the form that was asked for; return the files."""
    if folder is not None:
        return write_folder(model, untrained, folder, tell)
    assert options.out is not None
    if options.format == "universal":
        tell(f"converting with DeepSpeed to {options.out / model.directory.name} ...")
        written = write_universal(model, untrained, options.out)
        return [file for file in written.rglob("*") if file.is_file()]
    dtype = DTYPES[options.dtype]
    return write_safetensors(model, untrained, options.out, dtype, options.shard_bytes, tell)


def _folder_options(options: ExportOptions) -> FolderOptions | None:
    """Return what is asked of a Hugging Face folder, if one is; ValueError for what cannot be."""
    if options.hf is None:
        return None
    return FolderOptions(
        options.hf,
        options.path,
        options.config,
        options.tokenizer,
        options.dtype,
        options.shard_bytes,
    )


def _require_whole(model: SavedModel) -> None:
    """Refuse slices of tensor parallelism, which nobody could load as they are."""
    slices = [name for name in model.parameters if re.search(r"\.slice_\d+$", name)]
    if slices:
        raise ValueError(
            f"{model.directory} holds {slices[0]} and {len(slices) - 1} more slices of "
            "tensor-parallel weights, which dsx export does not join: convert Megatron's own "
            "checkpoint of this iteration, which holds the averaged model after finish()"
        )
