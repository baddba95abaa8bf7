"""`dsx agent -- deepspeed ...`: looks after the launcher of one site.

Exit status: 0 where the command has done its work or was told to stop (`dsx ctl stop`, `leave`);
128 and the signal's number, 143 for SIGTERM or a notice, where it was told to end; 2, 126 and 127
at once, as another start does not mend them; that of the last failure where it is given up.
"""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dsx.core.one_line_errors import one_line_errors

if TYPE_CHECKING:
    from dsx.checkpoint.remote import Remote

_SIGNALS = {"TERM": signal.SIGTERM, "USR1": signal.SIGUSR1}


NoticeCommand = Annotated[
    str | None,
    typer.Option(
        metavar="CMD",
        help="Asked now and then: exit status 0, or output, says that the machine goes away.",
    ),
]


@one_line_errors("agent")
def agent(
    command: Annotated[
        list[str] | None, typer.Argument(metavar="-- COMMAND ...", help="What to run.")
    ] = None,
    tries: Annotated[
        int, typer.Option(help="Failures within the window after which it gives up.", min=1)
    ] = 5,
    window: Annotated[float, typer.Option(help="That window, in seconds.", min=1.0)] = 3600.0,
    wait: Annotated[
        float, typer.Option(help="Before the first start again, in seconds; then twice as long.")
    ] = 5.0,
    most_wait: Annotated[float, typer.Option(help="The longest wait, in seconds.")] = 300.0,
    grace: Annotated[
        float, typer.Option(help="How long it may take to end when told to; then it is killed.")
    ] = 60.0,
    notice: NoticeCommand = None,
    notice_every: Annotated[float, typer.Option(help="How often, in seconds.", min=0.1)] = 5.0,
    notice_signal: Annotated[
        str, typer.Option(help="What the command gets then: TERM or USR1.")
    ] = "TERM",
    checkpoints: Annotated[
        Path | None, typer.Option(help="Where it saves: the folder that holds cluster_<m>.")
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Where the newest checkpoint is copied after a notice."),
    ] = None,
) -> None:
    """Run a site's launcher: start it again where it fails, and leave in time where told to."""
    from dsx.agent.agent import PASSED_ON, Agent
    from dsx.agent.notice import Notice
    from dsx.agent.tries import Tries

    if not command:
        raise ValueError("give the command to look after behind --: dsx agent -- deepspeed ...")
    if notice_signal not in _SIGNALS:
        raise ValueError(f"--notice-signal {notice_signal} must be one of {', '.join(_SIGNALS)}")
    if to is not None and (checkpoints is None or notice is None):
        raise ValueError("--to needs --notice, and --checkpoints DIR, the folder to copy from")
    remote = None if to is None else _open(to)
    logging.basicConfig(level=logging.INFO, format="dsx agent: %(message)s", force=True)
    looked_after = Agent(
        command, Tries(tries, window, wait, most_wait), grace, _SIGNALS[notice_signal]
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        looked_after.tell(number, f"told by {signal.Signals(number).name}")

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    watch = None if notice is None else Notice(notice, notice_every, looked_after.notice)
    status = looked_after.run()
    if watch is not None:
        watch.close()
    if looked_after.was_noticed and remote is not None and checkpoints is not None:
        _copy(checkpoints, remote)
    raise typer.Exit(status)


def _open(to: str) -> Remote:
    """Say now what is missing for such a URL."""
    from dsx.agent.copies import OPTION
    from dsx.checkpoint.remote import Remote

    return Remote(to, OPTION)


def _copy(checkpoints: Path, remote: Remote) -> None:
    from dsx.agent.copies import copy_newest

    logger = logging.getLogger("dsx.agent")
    try:
        copy_newest(checkpoints, remote, lambda told: logger.info("copying: %s", told))
    except Exception as error:  # noqa: BLE001 - each file system has errors of its own
        logger.error("not copied to %s: %s", remote.url, error)
