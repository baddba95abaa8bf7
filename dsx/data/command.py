"""`dsx data`: build a dataset from the command line, and compare a copy with its manifest.

    dsx data build --from stdlib --out data/stdlib
    dsx data build --from docs notes.txt --out data/mine
    dsx data check data/mine

A mistake of the user ends with one line on stderr and exit code 2; `--json` prints the summary as
one JSON object on stdout and nothing else.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.data.manifest import BuildSummary

app = typer.Typer(no_args_is_help=True, help="Build token datasets in Megatron's indexed format.")


@app.callback()
def data() -> None:
    """Build token datasets in Megatron's indexed format."""


@app.command()
@one_line_errors("data build", ModuleNotFoundError, RuntimeError)
def build(
    sources: Annotated[
        list[str],
        typer.Option(
            "--from",
            metavar="stdlib|PATH",
            help="What to read: 'stdlib' (Python's own library), a file or a directory: text, JSON "
            "lines (.jsonl, .jsonl.gz), Parquet, or what Hugging Face's datasets has saved.",
        ),
    ],
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="The directory to create.")],
    more_sources: Annotated[
        list[str] | None, typer.Argument(metavar="PATH", help="More sources after --from.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            metavar="DIR", help="A Hugging Face folder with tokenizer.json. Default: bytes."
        ),
    ] = None,
    text_key: Annotated[
        str, typer.Option(metavar="NAME", help="The column with the text, where files have rows.")
    ] = "text",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read; count them.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Processes; default: as many as there are cores."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Rebuild what is up to date.")] = False,
    validation_fraction: Annotated[
        float, typer.Option("--validation-fraction", help="Share of the documents to hold out.")
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Build a dataset from local files: a document of each text file, and of each row of others.

    It writes DIR/train and DIR/validation (.bin, .idx) and DIR/dataset.json, the same to the bit
    with any number of processes. Was it killed, the same command goes on.
    """
    from dsx.data.dataset import build as build_dataset
    from dsx.data.progress import shown_progress

    with shown_progress() as progress:
        summary = build_dataset(
            [*sources, *(more_sources or [])],
            out,
            validation_fraction=validation_fraction,
            force=force,
            tokenizer=tokenizer,
            text_key=text_key,
            skip_bad=skip_bad,
            workers=workers or len(os.sched_getaffinity(0)),
            progress=progress,
        )
    (_print_json if as_json else _print_table)(summary)


@app.command()
@one_line_errors("data check")
def check(
    directories: Annotated[
        list[str], typer.Argument(metavar="DIR...", help="What dsx data build has made.")
    ],
) -> None:
    """Read all tokens of datasets, and compare them with their manifests: after a copy, say.

    Of several it also says how many documents they have in common. Exits with 1 for a dataset that
    is not what its dataset.json says.
    """
    from dsx.data.check import check_files, tell_overlap
    from dsx.data.manifest import read_summary

    summaries = [read_summary(directory) for directory in directories]
    wrong = [problem for summary in summaries if (problem := check_files(summary))]
    for summary in summaries:
        typer.echo(f"{summary.path}: content_digest {summary.content_digest}")
    for line in [*wrong, *tell_overlap(summaries)]:
        typer.echo(line)
    if wrong:
        raise typer.Exit(1)


def _print_json(summary: BuildSummary) -> None:
    fields = asdict(summary)
    del fields["sketch"]  # of use to programs that read dataset.json
    typer.echo(json.dumps(fields))


def _print_table(summary: BuildSummary) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    table.add_column("split")
    table.add_column("documents", justify="right")
    table.add_column("tokens", justify="right")
    for name, split in (("train", summary.train), ("validation", summary.validation)):
        table.add_row(name, f"{split.num_documents:,}", f"{split.num_tokens:,}")
    console = Console(highlight=False)
    for line in (f"{summary.path}: {summary.status}", table, *_facts(summary)):
        console.print(line, markup=False, soft_wrap=True)


def _facts(summary: BuildSummary) -> list[str]:
    lines = [
        f"from {', '.join(summary.sources)}; tokenizer {summary.tokenizer}, "
        f"vocabulary {summary.vocab_size}, {summary.dtype}",
        f"unigram entropy {summary.unigram_entropy:.4f} nats per token",
    ]
    counts = asdict(summary.skipped).items()
    counted = ", ".join(
        f"{count} {name.removeprefix('num_').replace('_', ' ')}" for name, count in counts if count
    )
    return [*lines, f"skipped: {counted}"] if counted else lines
