"""Tells people of what happens in a run (`metrics.notices`), on the first rank of each cluster.

Also of an end that nobody tells dsx: an error of the script's, which `sys.excepthook` sees, and a
process that just ends. What is on its way then has a few seconds to arrive.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
from pathlib import Path
from types import TracebackType

from dsx.comm.world import World
from dsx.config.notices import NoticeConfig
from dsx.config.schema import DsxConfig
from dsx.core.membership import Membership
from dsx.method.alarms import BOUNDS
from dsx.telemetry.notices.happenings import Happenings
from dsx.telemetry.notices.hooks import Command, Hook, Webhook
from dsx.telemetry.notices.sender import Sender
from dsx.telemetry.progress import Progress

_END_SECONDS = 5.0  # that the end waits for notices
_MOST_BYTES = 65_536  # of a file that holds an address
_WITHOUT_FINISH = "the process ends without finish()"


class Telling:
    """One cluster's; does nothing on other ranks, and without `metrics.notices`."""

    def __init__(self, config: DsxConfig, world: World, progress: Progress) -> None:
        """Raises ValueError or OSError, without secrets, for a place that cannot be told."""
        notices = config.metrics.notices if world.rank == 0 else ()
        self._senders = [
            Sender(hook_of(notice, index), notice.kinds, notice.per_hour)
            for index, notice in enumerate(notices)
        ]
        self._happenings = Happenings(
            world.cluster_id,
            world.seat.ids,
            config.preset,
            socket.gethostname(),
            [sender.tell for sender in self._senders],
            {bound.kind: f"{bound.is_beyond}; {bound.advice}" for bound in reversed(BOUNDS)},
            lambda: progress.loss,
        )
        self._step, self._error = 0, ""
        self._process = os.getpid()
        self._is_closed = not self._senders
        self.rolled_back, self.waits = self._happenings.rolled_back, self._happenings.waits
        self.sync, self.not_saved = self._happenings.sync, self._happenings.not_saved
        self.not_copied = self._happenings.not_copied
        if self._senders:
            self._excepthook, sys.excepthook = sys.excepthook, self._see_error
            atexit.register(self._end_by_itself)

    def begin(self, step: int, folder: Path | None) -> None:
        """Go on from a step, in the run's folder, whose name is the run's from now on."""
        self._step = step
        if folder is not None:
            self._happenings.run = folder.name

    def step(self, step: int, membership: Membership) -> None:
        """Take a step, and who trains by then."""
        self._step = step
        self._happenings.step(step, membership)

    def end(self, step: int, how: str, is_own: bool) -> None:
        """Take how training ended; `is_own`: this cluster's part alone, and not all of it."""
        error = sys.exc_info()[1]
        if how != "finished" and error is not None and not isinstance(error, SystemExit):
            how = _told_of(error) if _told_of(error) not in how else how
        self._happenings.end(step, how, is_own)

    def close(self) -> None:
        """Return once everything is sent, or some seconds are over."""
        if self._is_closed or os.getpid() != self._process:
            return
        self._is_closed = True
        until = time.monotonic() + _END_SECONDS
        for sender in self._senders:  # all are told before one is waited for
            sender.end(until)
        for sender in self._senders:
            sender.close(until)
        atexit.unregister(self._end_by_itself)
        if sys.excepthook == self._see_error:
            sys.excepthook = self._excepthook

    def _see_error(
        self, kind: type[BaseException], error: BaseException, where: TracebackType | None
    ) -> None:
        self._error = _told_of(error)
        self._excepthook(kind, error, where)

    def _end_by_itself(self) -> None:
        """Tell of an end that nobody has told of: the interpreter goes."""
        if os.getpid() == self._process:
            self._happenings.end(self._step, self._error or _WITHOUT_FINISH, is_own=True)
            self.close()


def hook_of(notice: NoticeConfig, index: int) -> Hook:
    """Return a place to tell, the `index`-th; ValueError or OSError where there is none."""
    if notice.command is not None:
        return Command(notice.command)
    where = f"dsx.metrics.notices[{index}]"
    if notice.url is not None:
        return Webhook(notice.url.get_secret_value(), notice.form)
    if notice.url_env is not None:
        where += f".url_env={notice.url_env!r}"
        if not (url := os.environ.get(notice.url_env, "").strip()):
            raise ValueError(
                f"{where} is not in the environment of the first rank, or empty; export it there "
                "before the launch (some launchers pass on only what they are told to)"
            )
    else:
        assert notice.url_file is not None
        where += f".url_file={notice.url_file!r}"
        url = _read(notice.url_file, where)
    try:
        return Webhook(url, notice.form)
    except ValueError as error:
        raise ValueError(f"{where}: what it holds {error}") from None


def _read(path: str, where: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(_MOST_BYTES).decode(errors="replace").strip()
    except OSError as error:
        raise OSError(
            f"{where} cannot be read: {error.strerror}; give a file of this host whose only line "
            "is the address"
        ) from error


def _told_of(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
