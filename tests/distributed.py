"""Run a function on several ranks, as a launcher would start them, with a deadline."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import queue
import random
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tests.templates import ForkedRank, environment_of_imports, start_templates

PART = 2  # see `run_by_parts`


def free_port() -> int:
    """A TCP port that was free a moment ago, below those that connections are given meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def the_default_port() -> Iterator[None]:
    """Wait for the launchers' default port, which what is run as printed takes: one at a time."""
    with open(os.path.join(tempfile.gettempdir(), "dsx-tests.29500.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_distributed(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    ends_together: bool = True,
    engine: str | None = "deepspeed",
) -> list[Any]:
    """Return `function(*args)` of every rank, in rank order; AssertionError with the traceback.

    A rank's process goes on until all have returned, unless not to end together is what is tested.
    It is forked from the template for `engine`; None: each is an interpreter of its own.
    """
    if engine:
        start_templates(engine)
    context = multiprocessing.get_context("forkserver" if engine else "spawn")
    results, all_done = context.Queue(), context.Event()
    if not ends_together:
        all_done.set()
    port = free_port()
    extensions = tempfile.mkdtemp(prefix="dsx-extensions-")

    def make_process(rank: int, **arguments: Any) -> Any:
        return ForkedRank(engine, rank, **arguments) if engine else context.Process(**arguments)

    def environment(rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "TORCH_EXTENSIONS_DIR": extensions,
        }

    ranks = [
        make_process(
            rank,
            target=_rank_main,
            args=(function, args, environment(rank), results, all_done),
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    try:
        return _collect(results, ranks, time.monotonic() + timeout_seconds)
    finally:
        all_done.set()
        for process in ranks:
            process.kill()
            process.join()
        shutil.rmtree(extensions, ignore_errors=True)


def run_by_parts(
    function: Callable[..., Any], world_size: int, *args: Any, of: Sequence[Any], **options: Any
) -> list[list[Any]]:
    """Return per rank the lists `function(*args, part)` as one; `options` are `run_distributed`'s.

    A part is `PART` of the things, in processes of its own: engines leave groups, with threads and
    files, by which all that follows in the same processes takes longer, up to twice as long.
    """
    parts = [of[start : start + PART] for start in range(0, len(of), PART)]
    found = [run_distributed(function, world_size, *args, part, **options) for part in parts]
    return [[value for part in found for value in part[rank]] for rank in range(world_size)]


def _collect(results: Any, ranks: list[Any], until: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            missing = [r for r in range(len(ranks)) if r not in values]
            assert time.monotonic() < until, f"ranks {missing} did not finish in time"
            dead = [r for r in missing if ranks[r].exitcode not in (None, 0)]
            assert not dead, f"ranks {dead} died"
            continue
        assert error is None, f"rank {rank}:\n{error}"
        values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: dict[str, str],
    results: Any,
    all_done: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment_of_imports | environment)
    rank = int(environment["RANK"])
    try:
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    all_done.wait()  # others may still need the store, which lives in rank 0
    os._exit(0)
