"""`dsx export`: the averaged model of a checkpoint, in files that others read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

_RUN = typer.Argument(
    metavar="RUN",
    help="A run's folder, the directory its checkpoints are in (it holds cluster_0, ...), one of "
    "them, or what handle.save wrote. With --megatron: or a Hugging Face folder.",
)
_OUT = typer.Option(metavar="DIR", help="Where to write weights, or a checkpoint.")
_HF = typer.Option(
    metavar="DIR", help="Write a folder there that Hugging Face's from_pretrained loads."
)
_MEGATRON = typer.Option(
    metavar="DIR", help="Write a checkpoint there that Megatron's --load takes, in any layout."
)
_CONFIG = typer.Option(
    help="With --hf: the model's config.json, or its folder. Default: what lies beside the "
    "checkpoint.",
)
_TOKENIZER = typer.Option(
    metavar="DIR",
    help="With --hf: the folder of the tokenizer's files. Default: that of config.json.",
)


@one_line_errors("export")
def export(
    run: Annotated[Path, _RUN],
    out: Annotated[Path | None, _OUT] = None,
    hf: Annotated[Path | None, _HF] = None,
    megatron: Annotated[Path | None, _MEGATRON] = None,
    config: Annotated[Path | None, _CONFIG] = None,
    tokenizer: Annotated[Path | None, _TOKENIZER] = None,
    format: Annotated[
        str, typer.Option(metavar="safetensors|universal", help="Weights alone, or a checkpoint.")
    ] = "safetensors",
    tag: Annotated[
        str | None, typer.Option(help="Default: the newest that all clusters hold complete.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="fp32|bf16|fp16", help="Of weights; not universal.")
    ] = "fp32",
    max_shard_size: Annotated[
        float, typer.Option(help="GB (10^9 bytes) per file; not universal.", min=1e-6)
    ] = 5.0,
) -> None:
    """Write the averaged model of a checkpoint, from its files alone.

    It runs on any machine. The model is what averaged() held at the save: by method the anchor, or
    the mean of the clusters, whose directories have to be there. Transfers that were in flight are
    left out.

    --hf DIR: safetensors, config.json, the tokenizer's files and a model card, for
    AutoModelForCausalLM.from_pretrained(DIR). The run has to have trained that very model.

    --megatron DIR: the weights of a Megatron run, or of a Hugging Face folder given in the place of
    RUN, as a checkpoint in Megatron's torch_dist format, for --load at another layout.

    --out DIR: model.safetensors, or several with an index, under the module's own names. Frozen
    parameters and buffers are cluster 0's.

    --out DIR --format universal: a DeepSpeed universal checkpoint, for another number of ranks: the
    averaged weights, with the inner optimizer's states of the first cluster at hand. Load it into
    an engine without dsx, with "checkpoint": {"load_universal": true} in its JSON.
    """
    from dsx.engines.export import ExportOptions, export_checkpoint

    options = ExportOptions(
        run, out, format, tag, dtype, max_shard_size, hf, config, tokenizer, megatron
    )
    export_checkpoint(options, typer.echo)
