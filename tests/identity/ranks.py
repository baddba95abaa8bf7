"""Run a function on several ranks, as one launcher over all clusters would start them.

Its own, and not tests/distributed.py: the same code has to start the ranks of both trees.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import random
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any


def run_ranks(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout_seconds: float
) -> list[Any]:
    """Return `function(*args)` of every rank, in rank order; RuntimeError with the traceback."""
    context = multiprocessing.get_context("spawn")
    results, all_done = context.Queue(), context.Event()
    shared = (_free_port(), tempfile.mkdtemp(prefix="dsx-extensions-"), results, all_done)
    ranks = [
        context.Process(target=_main, args=(function, args, rank, num_ranks, *shared), daemon=True)
        for rank in range(num_ranks)
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


def _free_port() -> int:
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port


def _collect(results: Any, ranks: list[Any], until: float) -> list[Any]:
    values: dict[int, Any] = {}
    while len(values) < len(ranks):
        try:
            rank, value, error = results.get(timeout=0.2)
        except queue.Empty:
            missing = [r for r in range(len(ranks)) if r not in values]
            dead = [r for r in missing if ranks[r].exitcode not in (None, 0)]
            if dead or time.monotonic() > until:
                what = f"ranks {dead} died" if dead else f"ranks {missing} did not finish in time"
                raise RuntimeError(what) from None
            continue
        if error is not None:
            raise RuntimeError(f"rank {rank}:\n{error}")
        values[rank] = value
    return [values[rank] for rank in range(len(ranks))]


def _main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    num_ranks: int,
    port: int,
    extensions: str,
    results: Any,
    all_done: Any,
) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCH_EXTENSIONS_DIR=extensions,
        DS_ACCELERATOR="cpu",
        CUDA_VISIBLE_DEVICES="",
    )
    try:
        results.put((rank, function(*args), None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    all_done.wait()  # others may still need the store, which lives in rank 0
    os._exit(0)
