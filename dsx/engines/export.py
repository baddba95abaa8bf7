"""What `dsx export` does with its options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dsx.checkpoint.averaged_model import MODULE_FACTS, SavedModel, bare_model, find_model
from dsx.checkpoint.of_run import find_saved
from dsx.checkpoint.weight_files import DTYPES, write_safetensors
from dsx.engines.deepspeed.files import read_untrained, write_universal
from dsx.engines.hf_folder.folder import Converted, FolderOptions, tokenizer_in, write_folder
from dsx.engines.megatron_model.convert import convert_folder
from dsx.engines.megatron_model.dist_checkpoint import require_no_checkpoint, write_megatron
from dsx.engines.megatron_model.from_huggingface import is_huggingface_folder
from dsx.engines.megatron_model.huggingface import HuggingFaceModel
from dsx.engines.megatron_model.joined import JoinedModel
from dsx.engines.megatron_model.notes import NOTES, read_notes

FORMATS = ("safetensors", "universal")


@dataclass(frozen=True)
class ExportOptions:
    """The command line; sizes in GB.

    Of `out`, `hf`, the Hugging Face folder, and `megatron`, the checkpoint, one is given.
    """

    path: Path
    out: Path | None
    format: str
    tag: str | None
    dtype: str
    max_shard_size: float
    hf: Path | None = None
    config: Path | None = None
    tokenizer: Path | None = None
    megatron: Path | None = None

    def __post_init__(self) -> None:
        if sum(place is not None for place in (self.out, self.hf, self.megatron)) != 1:
            raise ValueError(
                "give one of --out DIR, for the weights, --hf DIR, for a folder that Hugging "
                "Face's transformers loads, and --megatron DIR, for a checkpoint that Megatron's "
                "--load takes"
            )
        if self.hf is None and (self.config or self.tokenizer):
            given = "--config" if self.config else "--tokenizer"
            other = "--out" if self.megatron is None else "--megatron"
            raise ValueError(f"{given} goes with --hf DIR: give that in the place of {other}")
        if self.format not in FORMATS:
            raise ValueError(f"--format {self.format} must be one of {', '.join(FORMATS)}")
        if self.out is None and self.format != "safetensors":
            given = "--hf" if self.megatron is None else "--megatron"
            raise ValueError(
                f"--format {self.format} goes with --out DIR: give that in the place of {given}, "
                "or leave it out"
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
    if options.megatron is not None:
        require_no_checkpoint(options.megatron)
        if is_huggingface_folder(options.path):
            dtype, tokenizer = DTYPES[options.dtype], tokenizer_in(options.path)
            convert_folder(options.path, options.megatron, dtype, tokenizer, tell)
            return
    saved = find_saved(options.path, options.tag)
    model = bare_model(saved.base) if saved.is_bare else find_model(saved.base, saved.tag)
    joined = _joined(model)
    what = f"mean of {model.num_saved_clusters} clusters" if model.is_mean else "anchor"
    tell(f"{model.directory}: {what} at step {model.step}, {model.numel:,} trained elements")
    if model.is_second_best:
        tell(
            f"averaged() would be the mean of {model.num_saved_clusters} clusters, not all of "
            f"which are in {saved.base}: this is the anchor, which they share"
        )
    if model.in_flight:
        tell(f"left out: {model.in_flight} transfer(s) that were in flight")
    files = _write(model, joined, options, folder, tell)
    size = sum(file.stat().st_size for file in files)
    where = options.hf or options.megatron or options.out
    tell(f"wrote {len(files)} file(s), {size:,} bytes, to {where}")


def _write(
    model: SavedModel,
    joined: JoinedModel | None,
    options: ExportOptions,
    folder: FolderOptions | None,
    tell: Callable[[str], None],
) -> list[Path]:
    """Write the model in the form that was asked for; return the files."""
    untrained = {} if joined else read_untrained(model)
    if folder is not None:
        return write_folder(model, untrained, folder, tell, _converted(joined, tell))
    if options.megatron is not None:
        if joined is None:
            raise ValueError(
                f"--megatron {options.megatron} is for a Megatron run, and {model.directory} holds "
                f"no {NOTES} of one: give --out or --hf"
            )
        return write_megatron(joined, options.megatron, DTYPES[options.dtype])
    assert options.out is not None
    if options.format == "universal" and joined is not None:
        raise ValueError(
            f"--format universal is DeepSpeed's, and {model.directory} is of a Megatron run: leave "
            "it out for the weights under Megatron's names, or give --hf DIR in the place of --out"
        )
    experts = [name for name in model.parameters if ".deepspeed_experts." in name]
    if options.format == "universal" and experts:
        raise ValueError(
            f"--format universal: DeepSpeed's converter does not know {experts[0]} and other "
            "experts of its MoE layers; leave it out for the weights under their names"
        )
    if options.format == "universal":
        tell(f"converting with DeepSpeed to {options.out / model.directory.name} ...")
        written = write_universal(model, untrained, options.out)
        return [file for file in written.rglob("*") if file.is_file()]
    dtype = DTYPES[options.dtype]
    return write_safetensors(
        joined or model, untrained, options.out, dtype, options.shard_bytes, tell
    )


def _converted(joined: JoinedModel | None, tell: Callable[[str], None]) -> Converted | None:
    """Return a Megatron run's model as Hugging Face has it; None of another run."""
    if joined is None:
        return None
    weights, notes = HuggingFaceModel(joined), joined.notes
    tell(f"as {weights.config['model_type']}: {len(weights.parameters)} tensors")
    if notes.vocab_size is None:
        tell(
            f"vocabulary: all {notes.rows:,} rows, with those that Megatron pads it by: the run "
            "has not said how many are in use"
        )
    elif notes.vocab_size < notes.rows:
        tell(f"vocabulary: {notes.vocab_size:,} of {notes.rows:,} rows, without Megatron's padding")
    return Converted(weights, weights.config, joined.saved.directory / NOTES)


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


def _joined(model: SavedModel) -> JoinedModel | None:
    """Return a Megatron run's model with its slices joined; None of another run.

    ValueError for slices of tensor or expert parallelism that nothing is said of.
    """
    notes = read_notes(model.directory)
    if notes is not None:
        return JoinedModel(model, notes)
    slices = [name for name in model.parameters if re.search(r"\.(slice|experts)_\d+$", name)]
    if slices and (model.directory / MODULE_FACTS).is_file():
        raise ValueError(
            f"{model.directory} holds {slices[0]} and {len(slices) - 1} more slices that AutoTP "
            "has cut, and nothing says how they are joined: DeepSpeed joins them at the end of a "
            "script, after finish(): engine._consolidated_16bit_state_dict() on every rank"
        )
    if slices:
        raise ValueError(
            f"{model.directory} holds {slices[0]} and {len(slices) - 1} more slices of "
            f"weights, and no {NOTES}, which says how they are joined: go on from "
            "it with this dsx and save it again, or convert Megatron's own checkpoint of this "
            "iteration, which holds the averaged model after finish()"
        )
    return None
