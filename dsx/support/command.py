"""`dsx support`: what helps to find out why a run went wrong, in one file without keys or data."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors
from dsx.telemetry.run_folder import RUN_HELP

if TYPE_CHECKING:
    from dsx.support.pack import Pack

_ENDING = ".tar.gz"
_NEVER = (
    "never packed: weights, optimizer states, data, environment variables, a script's own texts "
    "in its records (numbers are), source code, summary.json, TensorBoard's files"
)


@one_line_errors("support")
def support(
    run: Annotated[Path, typer.Argument(metavar="RUN", help=RUN_HELP)],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.tar.gz", help="Default: dsx-support-<run>-<time>.tar.gz here."),
    ] = None,
) -> None:
    """Pack what helps to find out why a run went wrong.

    Logs, run.json, stacks of ranks that stalled, the last records, names and sizes of checkpoints,
    and versions become one file. Keys are removed, names of hosts and users replaced; weights and
    data are never in it.
    """
    from dsx.support.pack import collect

    folder = _folder_of(run)
    file = out or Path(f"dsx-support-{folder.resolve().name}-{_now()}{_ENDING}")
    if not file.name.endswith(_ENDING):
        raise ValueError(f"--out {file}: the file is a tar.gz; give a name that ends in {_ENDING}")
    pack = collect(folder)
    lines = _explain(pack)
    pack.write(file, "\n".join([*lines, ""]))
    size = file.stat().st_size
    for line in lines:
        typer.echo(line)
    typer.echo(
        f"wrote {size:,} bytes to {file}: look through it (tar xzf), then attach it to your issue "
        "on dsx's page, with what you expected and what happened; one from each site, if they "
        "share no file system"
    )


def _folder_of(run: Path) -> Path:
    """Return the run's folder; one without run.json and metrics will do, too."""
    from dsx.support.pack import is_packable
    from dsx.telemetry.run_folder import find_run

    try:
        return find_run(run)
    except FileNotFoundError:
        if is_packable(run):
            return run
        raise


def _explain(pack: Pack) -> list[str]:
    width = max(map(len, pack.parts))
    packed = [
        f"  {name:<{width}} {len(content):>11,} bytes  {pack.notes[name]}".rstrip()
        for name, content in pack.parts.items()
    ]
    removed = [f"{count} x {what}" for what, count in sorted(pack.scrubber.found.items()) if count]
    kinds = {"host": "names of hosts", "ip": "IP addresses", "mac": "MACs", "user": "users"}
    replaced = [f"{count} {kinds[kind]}" for kind, count in pack.scrubber.pseudonyms.items()]
    return [
        "packed:",
        *packed,
        "left out:",
        *(f"  {what}" for what in pack.left_out),
        f"  {_NEVER}",
        f"removed: {', '.join(removed) or 'nothing looked like a key'}",
        f"replaced by pseudonyms (host-1, ip-1, user-1): {', '.join(replaced) or 'nothing'}",
        "kept: paths, but for users' names; command line, configuration, names of parameters",
    ]


def _now() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
