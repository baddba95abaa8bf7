"""`dsx keys`: make, exchange, show and revoke the keys by which clusters know each other.

    dsx keys new site-a
    dsx keys add site-b.public
    dsx keys list
    dsx keys revoke site-b

The public line goes to stdout and what is said about it to stderr, so that `> FILE` has the line
alone. A mistake of the user ends with one line on stderr and exit code 2.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.comm.links.key_lines import PublicKey

app = typer.Typer(no_args_is_help=True, help="Keys by which clusters know each other.")

Directory = Annotated[
    str, typer.Option("--dir", metavar="DIR", help="The folder of keys: NAME.secret and members/.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The member: one cluster of a run.")]
_MOST_CHARACTERS = 1 << 16


@app.callback()
def keys() -> None:
    """Keys by which clusters know each other."""


@app.command()
@one_line_errors("keys new", ModuleNotFoundError)
def new(
    name: Name,
    directory: Directory = "keys",
    is_next: Annotated[
        bool, typer.Option("--next", help="Make a second key, for a member that has one.")
    ] = False,
) -> None:
    """Make a member's key on its own host, and print the public line that the others need.

    Nothing is overwritten. With --next the member has two keys: it goes on with the first until
    that is revoked here, and then takes the second, without a stop.
    """
    from dsx.comm.links.key_changes import make_key
    from dsx.comm.links.key_files import secret_path

    *before, made = make_key(Path(directory), name, is_next=is_next)
    typer.echo(made.line)
    secret = secret_path(Path(directory), name)
    _say(f"{secret} is {name}'s alone (mode 0600): it stays on this host, and is sent to nobody")
    _say("to the other sites goes the line above; there: dsx keys add LINE (or a FILE with it)")
    _say(f"compare on another way, by telephone say: {made.fingerprint}")
    if before:
        old = before[0].fingerprint
        _say(f"{name} goes on with {old} until all others have added the new one; then, here first")
        _say(f"and then at the others: dsx keys revoke {name} --key {old}{_dir(directory)}")


@app.command()
@one_line_errors("keys add", ModuleNotFoundError)
def add(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="LINE|FILE|-", help="A public line, a file of such, or - for stdin."
        ),
    ],
    directory: Directory = "keys",
) -> None:
    """Make another site's key a member's.

    A key that has been revoked here is refused, as is another member's.
    """
    from dsx.comm.links.key_changes import add_key

    for key in _given(source):
        there = add_key(Path(directory), key)
        if there is None:
            typer.echo(f"{key.name}  {key.fingerprint}  is a member's key already")
            continue
        typer.echo(f"{key.name}  {key.fingerprint}  added; compare it with what {key.name} sees")
        if len(there) > 1:
            old = there[0].fingerprint
            typer.echo(
                f"{key.name} has two keys now; once it has revoked {old} itself, here too: "
                f"dsx keys revoke {key.name} --key {old}{_dir(directory)}"
            )


@app.command("list")
@one_line_errors("keys list", ModuleNotFoundError)
def list_keys(directory: Directory = "keys") -> None:
    """Show all members' keys by their fingerprints, which secrets are here, and what is revoked.

    Exits with 1 where a file of the folder cannot be used, and says which and why.
    """
    from rich.console import Console
    from rich.table import Table

    from dsx.comm.links.key_list import listing

    found = listing(Path(directory))
    table = Table()
    for title in ("member", "key", "made", ""):
        table.add_column(title)
    for row in found.rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    for problem in found.problems:
        _say(problem)
    if found.problems:
        raise typer.Exit(1)


@app.command()
@one_line_errors("keys revoke", ModuleNotFoundError)
def revoke(
    name: Name,
    key: Annotated[
        str | None,
        typer.Option(metavar="FINGERPRINT", help="This key alone; its beginning is enough."),
    ] = None,
    is_older: Annotated[
        bool, typer.Option("--older", help="The older alone, of a member that has two.")
    ] = False,
    directory: Directory = "keys",
) -> None:
    """Put a member's keys out for good, here: runs that use this folder drop it within a round.

    A secret of theirs in this folder is erased. Every site has its own folder: do it at each.
    """
    from dsx.comm.links.key_changes import revoke_keys

    done = revoke_keys(Path(directory), name, key, is_older=is_older)
    for gone in done.gone:
        typer.echo(f"{name}  {gone.fingerprint}  revoked")
    if done.left:
        typer.echo(f"{name}  {done.left[0].fingerprint}  is the key that is left")
    else:
        typer.echo(f"{name} has no key left here: it is no member any more")
    option = f" --key {done.gone[0].fingerprint}" if done.left else ""
    typer.echo(f"at every other site, too: dsx keys revoke {name}{option}")
    if done.not_erased:
        _say(f"its secret is still here and was not erased: {done.not_erased}")
        raise typer.Exit(1)


def _given(source: list[str]) -> list[PublicKey]:
    """Return the keys of a line (in one word, or as the shell has split it), a file or stdin."""
    from dsx.comm.links.key_lines import VERSION, read_key

    line = " ".join(source)
    if line.startswith(VERSION):
        return [read_key(line)]
    if len(source) > 1:
        raise ValueError(f"it takes one public line, which begins with {VERSION}, one file or -")
    if line == "-":
        place, text = "stdin", sys.stdin.read(_MOST_CHARACTERS)
    else:
        place, path = line, Path(line)
        if not path.is_file():
            raise ValueError(
                f"{line[:80]!r} is neither a file nor a line that begins with {VERSION}"
            )
        with path.open(encoding="ascii", errors="replace") as file:
            text = file.read(_MOST_CHARACTERS)
    found: list[PublicKey] = []
    for number, entry in enumerate(text.split("\n"), start=1):
        if entry.strip() and not entry.startswith("#"):
            try:
                found.append(read_key(entry))
            except ValueError as error:
                raise ValueError(f"{place}:{number}: {error}") from None
    if not found:
        raise ValueError(f"{place} holds no line that begins with {VERSION}")
    return found


def _dir(directory: str) -> str:
    return "" if directory == "keys" else f" --dir {shlex.quote(directory)}"


def _say(text: str) -> None:
    typer.echo(text, err=True)
