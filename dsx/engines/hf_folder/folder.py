"""The folder itself: weights, config.json, the tokenizer's files, a model card; complete or absent.

It is written beside its place, as `<DIR>.unfinished`, and renamed. Of config.json the type of the
weights is changed, which from_pretrained takes from it, and nothing else.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel
from dsx.checkpoint.tags import UNFINISHED
from dsx.checkpoint.weight_files import DTYPES, Weights, write_safetensors
from dsx.config.files import read_text, require_folder
from dsx.engines.hf_folder.architecture import (
    Architecture,
    architecture_of,
    is_transformers_installed,
)
from dsx.engines.hf_folder.card import CARD, card, facts_of
from dsx.engines.hf_folder.names import (
    Tensors,
    left_out,
    require_names_of_a_module,
    require_same,
)

CONFIG = "config.json"
BESIDE = "generation_config.json"
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
Tell = Callable[[str], None]


@dataclass(frozen=True)
class FolderOptions:
    """What `--hf` and its further options name; `given` is the path of the run."""

    out: Path
    given: Path
    config: Path | None
    tokenizer: Path | None
    dtype: str
    shard_bytes: int

    def __post_init__(self) -> None:
        require_folder("--hf", str(self.out))
        if self.out.is_dir() and any(self.out.iterdir()):
            raise ValueError(
                f"--hf {self.out} holds files already, which would be mixed up with these: remove "
                "it, or give another folder"
            )
        if self.tokenizer is not None and not tokenizer_in(self.tokenizer):
            raise ValueError(
                f"--tokenizer {self.tokenizer} holds none of a tokenizer's files "
                f"({', '.join(TOKENIZER[:2])}, ...); give the folder of tokenizer.save_pretrained"
            )


@dataclass(frozen=True)
class Converted:
    """A model whose weights are made for transformers: they, config.json, and what says so."""

    weights: Weights
    config: dict[str, Any]
    source: Path


def write_folder(
    model: SavedModel,
    untrained: Mapping[str, Tensor],
    options: FolderOptions,
    tell: Tell,
    converted: Converted | None = None,
) -> list[Path]:
    """Write a folder that transformers loads, and return its files.

    `converted`: in the place of the run's own tensors and of a config.json. ValueError, before
    anything is written, for a run or a config.json that does not serve.
    """
    weights, config, source = _described(model, options, converted)
    tensors = Tensors.of(weights, untrained)
    architecture = _compare(tensors, config, source, tell, as_in_files=converted is not None)
    leave = left_out(tensors, architecture, config, source)
    unfinished = options.out.with_name(f"{options.out.name}{UNFINISHED}")
    shutil.rmtree(unfinished, ignore_errors=True)
    dtype, shard_bytes = DTYPES[options.dtype], options.shard_bytes
    write_safetensors(weights, untrained, unfinished, dtype, shard_bytes, tell, leave)
    written = {**config, **_types(config, options.dtype)}
    (unfinished / CONFIG).write_text(json.dumps(written, indent=2) + "\n")
    _copy_beside(source.parent, options.tokenizer, unfinished, tell)
    facts, why = facts_of(model, options.given)
    if facts is None:
        tell(f"{CARD} has no records of the run: {why}")
    made_by = architecture.made_by if architecture else None
    text = card(options.out.name, model, _TYPES[options.dtype], facts, made_by)
    (unfinished / CARD).write_text(text)
    if options.out.is_dir():
        options.out.rmdir()  # empty
    unfinished.rename(options.out)
    return sorted(options.out.iterdir())


def _described(
    model: SavedModel, options: FolderOptions, converted: Converted | None
) -> tuple[Weights, dict[str, Any], Path]:
    """Return the weights, the config.json that describes them, and where that is from."""
    if converted is None:
        require_names_of_a_module(model)
        source = _find_config(model, options)
        return model, _read_config(source), source
    if options.config is not None:
        raise ValueError(
            f"--config {options.config}: of a Megatron run config.json follows from what the run "
            f"says of its model ({converted.source}); leave it out"
        )
    return converted.weights, converted.config, converted.source


def _find_config(model: SavedModel, options: FolderOptions) -> Path:
    """Return the config.json that is named, or that was saved in or beside the checkpoint."""
    if options.config is not None:
        return options.config / CONFIG if options.config.is_dir() else options.config
    given = options.given if options.given.is_dir() else options.given.parent
    base = model.directory.parents[1]
    for folder in dict.fromkeys((model.directory, model.directory.parent, base, given)):
        if (folder / CONFIG).is_file():
            return folder / CONFIG
    raise ValueError(
        f"no {CONFIG} in or beside {model.directory}: give --config with the one of the model that "
        "was trained (model.config.save_pretrained(DIR) writes it, and so does a Hugging Face "
        "folder have it)"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}; give another --config") from error
    config = cast("dict[str, Any]", found if isinstance(found, dict) else {})
    if not isinstance(config.get("model_type"), str):
        raise ValueError(
            f"{path} names no model_type, so it is no Hugging Face model's; give the {CONFIG} that "
            "model.config.save_pretrained(DIR) writes"
        )
    if config.get("quantization_config"):
        raise ValueError(
            f"{path} has a quantization_config, and the weights of a run are not quantized: give "
            "--config a file without that key"
        )
    return config


def _compare(
    tensors: Tensors, config: Mapping[str, Any], path: Path, tell: Tell, as_in_files: bool
) -> Architecture | None:
    """Refuse what is not config.json's model, where transformers can be asked for that.

    `as_in_files`: weights have the form that they have in files, and not that which is trained.
    """
    if not is_transformers_installed():
        tell(
            f"not compared with {path}, as transformers is not installed: pip install "
            '"dsx-train[clients]" to have names and shapes checked here'
        )
        return None
    architecture = architecture_of(config, path, as_in_files)
    require_same(tensors, architecture, path)
    tell(f"{len(tensors.shapes)} tensors, all that {architecture.made_by} has")
    return architecture


def _types(config: Mapping[str, Any], dtype: str) -> dict[str, str]:
    """Return the type of the weights, under the names that a config.json has for it."""
    names = [name for name in ("dtype", "torch_dtype") if name in config]
    return dict.fromkeys(names or ["torch_dtype"], _TYPES[dtype])  # every version reads the latter


def tokenizer_in(folder: Path) -> list[Path]:
    """Return the tokenizer's files in a folder."""
    return [folder / name for name in TOKENIZER if (folder / name).is_file()]


def _copy_beside(source: Path, tokenizer: Path | None, out: Path, tell: Tell) -> None:
    """Copy what a Hugging Face folder has beside weights and config.json."""
    if (source / BESIDE).is_file():
        shutil.copyfile(source / BESIDE, out / BESIDE)
    folder = tokenizer or source
    files = tokenizer_in(folder)
    for file in files:
        shutil.copyfile(file, out / file.name)
    if files:
        tell(f"tokenizer of {folder}: {', '.join(file.name for file in files)}")
    else:
        tell(f"no tokenizer: {folder} holds none; give --tokenizer DIR, or copy its files")
