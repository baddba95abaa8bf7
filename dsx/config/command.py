"""`dsx config`: every key of the "dsx" block, for readers and for editors."""

from __future__ import annotations

import json

import typer

from dsx.core.one_line_errors import one_line_errors

app = typer.Typer(no_args_is_help=True, help='The keys of the "dsx" block.')


@app.command()
@one_line_errors("config reference")
def reference() -> None:
    """Print every key with type, default, allowed values and meaning, as Markdown.

    docs/configuration.md is made so; what is installed or registered beside dsx is in it, too.
    """
    from dsx.config.reference import markdown

    typer.echo(markdown(), nl=False)


@app.command()
@one_line_errors("config schema")
def schema() -> None:
    """Print the JSON Schema of a DeepSpeed JSON with a "dsx" block, for editors.

    docs/dsx.schema.json is made so.
    """
    from dsx.config.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=2))
