"""A Hugging Face folder becomes a Megatron checkpoint, with what a run of it needs beside."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsx.engines.megatron_model.dist_checkpoint import write_megatron
from dsx.engines.megatron_model.from_config import flags_of
from dsx.engines.megatron_model.from_huggingface import HuggingFaceFolder

FLAGS, TOKENIZER = "flags.txt", "tokenizer"


def convert_folder(
    folder: Path,
    out: Path,
    dtype: torch.dtype,
    tokenizer: Sequence[Path],
    tell: Callable[[str], None],
) -> None:
    """Write the checkpoint, the flags of Megatron-LM that make its model, and the tokenizer.

    ValueError, before anything is written, for a model that is none of Megatron's.
    """
    model = HuggingFaceFolder(folder)
    tell(f"{folder}: a {model.kind}, as {len(model.parameters)} weights of Megatron's GPTModel")
    if model.unread:
        tell(f"not looked at in its config.json: {', '.join(model.unread)}")
    written = write_megatron(model, out, dtype)
    flags = flags_of(model.notes)
    if tokenizer:
        (out / TOKENIZER).mkdir()
        for file in tokenizer:
            shutil.copyfile(file, out / TOKENIZER / file.name)
        flags += ["--tokenizer-type", "HuggingFaceTokenizer"]
        flags += ["--tokenizer-model", str((out / TOKENIZER).absolute())]
        tell(f"tokenizer: {', '.join(file.name for file in tokenizer)}")
    else:
        tell(f"no tokenizer: {folder} holds none; say which by Megatron's --tokenizer-type")
    (out / FLAGS).write_text(shlex.join(flags) + "\n")
    size = sum(file.stat().st_size for file in written)
    tell(
        f"wrote {len(written)} file(s), {size:,} bytes, to {out}; its model's flags: {out / FLAGS}"
    )
