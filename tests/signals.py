"""What Ctrl-C does to a process that a test starts."""

from __future__ import annotations

import signal


def default_sigint() -> None:
    """Let it end the process; to be called between fork and exec.

    What runs in the background of a shell has it ignored, a thread may have it blocked, and both
    go on to what they start.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
