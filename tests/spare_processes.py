"""Processes that are forked while there is one thread, for commands started when there are more.

torchrun has threads before it starts its ranks, and where there are threads nothing can be forked.
So a process for each rank is forked before, a child of the launcher as any, and told what to be.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

Told = tuple[list[str], dict[str, str], dict[str, Any]]  # command, environment, Popen's arguments
_FILES = ("p2cread", "c2pwrite", "errwrite")  # among them: its three files, -1 where inherited
_TOLD = ("cwd", "start_new_session", "process_group")
_LENGTH = struct.Struct("q")
_spare: list[tuple[int, socket.socket]] = []


def ranks_of(program: Sequence[str]) -> int:
    """Return how many ranks a program starts here if it is torchrun, 0 for another."""
    is_module = [*program[:2]] == ["-m", "torch.distributed.run"]
    if not is_module and Path(program[0]).name != "torchrun":
        return 0
    told = [program[at + 1] for at, word in enumerate(program[:-1]) if word == "--nproc-per-node"]
    return int(told[0]) if told and str(told[0]).isdigit() else 0


def fork_spares(count: int, run: Callable[[Told], NoReturn]) -> None:
    """Fork children that wait for what each is to be, and end with this process if it is nothing.

    None are left of those that the process had which this one is forked from.
    """
    while _spare:
        _spare.pop()[1].detach()  # its descriptor is closed
    for _ in range(count):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for _, other in _spare:
                other.close()
            _wait(theirs, run)
        theirs.close()
        _spare.append((pid, ours))


def give_to_spare(command: list[str], environment: dict[str, str], given: dict[str, Any]) -> int:
    """Have a spare process be a command, with Popen's arguments; return its number, 0: none."""
    if not _spare or given["pass_fds"]:
        return 0
    pid, channel = _spare.pop(0)
    files = [name for name in _FILES if given[name] != -1]
    told = {name: given[name] for name in _TOLD if name in given}
    data = pickle.dumps((command, environment, files, told))
    with channel:
        numbers = [given[name] for name in files]
        socket.send_fds(channel, [_LENGTH.pack(len(data))], numbers)
        channel.sendall(data)
    return pid


def _wait(channel: socket.socket, run: Callable[[Told], NoReturn]) -> NoReturn:
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        length, numbers, *_ = socket.recv_fds(channel, _LENGTH.size, len(_FILES))
        if not length:  # whose child this is has ended
            os._exit(0)
        data = channel.recv(*_LENGTH.unpack(length), socket.MSG_WAITALL)
        command, environment, names, told = pickle.loads(data)
        files = dict.fromkeys(_FILES, -1) | dict(zip(names, numbers, strict=True))
        run((command, environment, told | files))
    except BaseException as error:
        os.write(2, f"a spare process: {error!r}\n".encode())
    os._exit(127)
