"""What Ctrl-C does to a process that a test starts."""

from __future__ import annotations

import signal


def default_sigint() -> None:
    """Let it end the process: what runs in the background of a shell has it ignored, and so have
    those that it starts. Between fork and exec.
    """  # fmt: skip
    signal.signal(signal.SIGINT, signal.SIG_DFL)
