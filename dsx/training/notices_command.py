"""`dsx notices`: sends a trial notice to each place of a configuration, before a run needs them.

Exit status: 0, 1 where one did not arrive, 2 for what cannot be read.
"""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

_SECONDS = 10.0


@one_line_errors("notices")
def notices(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The run's JSON.")],
) -> None:
    """Send a trial notice to each place of "metrics.notices".

    From this host, once, and of the kind "finished"; a run tries again what does not arrive.
    """
    from dsx.config.schema import load_config
    from dsx.telemetry.notices.hooks import Undelivered
    from dsx.telemetry.notices.notice import Notice
    from dsx.training.telling import hook_of

    loaded = load_config(config)
    if not loaded.metrics.notices:
        raise ValueError(
            f"{config} names nobody to tell; add, for example, "
            '"metrics": {"notices": [{"url_env": "SLACK_HOOK", "form": "slack"}]}'
        )
    text = "a trial (dsx notices): nothing has happened, and what happens is told here"
    trial = Notice(
        "finished", text, 0, (), 0, loaded.preset, socket.gethostname(), time.time()
    )  # fmt: skip
    has_failed = False
    for index, one in enumerate(loaded.metrics.notices):
        hook = hook_of(one, index)
        told = "has it"
        try:
            hook.deliver(trial, _SECONDS)
        except Undelivered as error:
            told, has_failed = f"does not have it: {error}", True
        typer.echo(f"{hook.name} {told}")
    raise typer.Exit(int(has_failed))
