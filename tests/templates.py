"""Processes that the ranks of tests are forked from, with all that is heavy imported once.

A spawned rank imports torch and an engine, which takes seconds of CPU time. A template is a
forkserver of the standard library that has imported them and run nothing. There are two of each
kind: as with a launcher, ranks differ in how they hash, hence in the order of their sets; those
that follow each other in a cluster, or are the same of two clusters, come from different ones.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import multiprocessing
import multiprocessing.context
import os
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection, forkserver, popen_forkserver, reduction, resource_tracker
from typing import Any
from unittest import mock

from tests.garbage import not_collecting

PRELOADS = {"deepspeed": "tests.preload_deepspeed", "megatron": "tests.preload_megatron"}


environment_of_imports: dict[str, str] = {}  # what importing has set
main_process = multiprocessing.current_process()  # in a template: before anything is forked


def preload(
    *names: str, first: Callable[[], None] | None = None, last: Callable[[], None] | None = None
) -> None:
    """Import modules as far as they are installed, in a process that ranks are forked from."""
    with not_collecting():
        import torch.distributed as dist  # who lends templates needs no torch

    os.environ["TORCH_WARM_POOL"] = "0"  # torch 2.6 starts threads where its compiler is imported
    before = dict(os.environ)
    with not_collecting():
        if first is not None:
            first()
        for name in names:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(name)
        if last is not None:
            last()
        _read_a_configuration()
    environment_of_imports.update(dict(os.environ.items() - before.items()))
    if dist.is_initialized() or threading.active_count() > 1:
        sys.exit(f"a module of {names} starts threads or torch.distributed: ranks cannot be forked")
    gc.collect()
    gc.freeze()  # what is shared with the ranks is not theirs to collect


def _read_a_configuration() -> None:
    """Have the models made that choices are read with, a twentieth of a second for each rank."""
    from dsx.config.schema import load_config

    load_config({"dsx": {"preset": "streaming_diloco", "clusters": {"num_clusters": 2}}})


_started: dict[str, list[Any]] = {}  # the two templates by engine
_lender: str | None = None  # where another process lends them


def start_templates(engine: str) -> None:
    """Have this process's two templates for `engine`, once; return when they have imported all."""
    if engine in _started:
        return
    _started[engine] = _run_templates(engine) if _lender is None else _borrowed(engine, _lender)
    for rank in range(2):
        process = ForkedRank(engine, rank)
        process.start()
        process.join()
        if process.exitcode != 0:
            raise RuntimeError(f"the template for {engine} ended; what it said stands above")


def _run_templates(engine: str) -> list[Any]:
    servers = [forkserver.ForkServer() for _ in range(2)]
    started_by = os.getpid()

    def stop() -> None:
        if os.getpid() == started_by:
            for server in servers:
                server._stop()  # type: ignore[attr-defined]

    atexit.register(stop)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PYTHONHASHSEED", None)
    with mock.patch.dict(os.environ, environment, clear=True):
        for server in servers:
            server.set_forkserver_preload([PRELOADS[engine]])
            server.ensure_running()
    return servers


def lend_templates() -> str:
    """Run templates for other processes, each kind once it is asked for; return where to ask."""
    listener = connection.Listener(family="AF_UNIX")
    servers: dict[str, list[Any]] = {}

    def serve() -> None:
        while True:
            with listener.accept() as borrower:
                engine = borrower.recv()
                if engine not in servers:
                    servers[engine] = _run_templates(engine)
                for server in servers[engine]:
                    borrower.send({name: getattr(server, name, None) for name in _HOW_TO_ASK})
                    reduction.send_handle(borrower, server._forkserver_alive_fd, None)

    threading.Thread(target=serve, daemon=True).start()
    return str(listener.address)


def borrow_templates(lender: str) -> None:
    """Fork from templates that another process lends, at what `lend_templates` has returned."""
    global _lender
    _lender = lender


_HOW_TO_ASK = ("_forkserver_address", "_forkserver_authkey")  # a key since Python 3.14


class _Borrowed(forkserver.ForkServer):
    """A forkserver that is another process's child, and ends behind all who hold its pipe."""

    def ensure_running(self) -> None:
        resource_tracker.ensure_running()  # which `connect_to_new_process` hands on


def _borrowed(engine: str, lender: str) -> list[Any]:
    servers: list[Any] = [_Borrowed() for _ in range(2)]
    with connection.Client(lender, family="AF_UNIX") as asked:
        asked.send(engine)
        for server in servers:
            vars(server).update(asked.recv())
            server._forkserver_alive_fd = reduction.recv_handle(asked)
    return servers


class ForkedRank(multiprocessing.context.ForkServerProcess):  # type: ignore[name-defined]
    """A process that is forked from the template for its engine and rank.

    What it prints goes to where the one that starts it prints, and not to where the template does.
    """

    def __init__(self, engine: str, rank: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.engine, self.rank = engine, rank

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": [reduction.DupFd(number) for number in (1, 2)]}

    def run(self) -> None:
        """Do what the process is for, in the new process."""
        for number, file in zip((1, 2), self.__dict__.pop("files"), strict=True):
            copy = file.detach()
            os.dup2(copy, number)
            os.close(copy)
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:
        is_odd = process.rank.bit_count() % 2  # not the same for two ranks that differ in one bit
        connect = _started[process.engine][is_odd].connect_to_new_process
        with mock.patch.object(forkserver, "connect_to_new_process", connect):
            return popen_forkserver.Popen(process)
