"""The loop of scripts that train until a file is there, for tests in which clusters go and come."""

from __future__ import annotations

import argparse
import faulthandler
import hashlib
import json
import logging
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dsx

_FIRST_STEPS = 5  # which are not measured: what is made at first use, is made there


def arguments(add: Callable[[argparse.ArgumentParser], object] | None = None) -> Any:
    """Return the command line's; SIGUSR1 shows where a rank stands from here on."""
    faulthandler.register(signal.SIGUSR1)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--out", required=True)
    parser.add_argument("--step-seconds", type=float, default=0.1)
    parser.add_argument("--stop-file", type=Path, required=True)
    if add is not None:
        add(parser)
    return dsx.add_config_arguments(parser).parse_args()


def train(
    handle: dsx.Handle,
    take_step: Callable[[int], Any],
    parameters: Callable[[], Iterable[torch.Tensor]],
    args: Any,
    more: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Train until the file is there, then write what each cluster tells: `OUT.CLUSTER`, JSON.

    `take_step` gets the number of the step, from 1 on. The checksum is of all ranks' bits.
    """
    is_first, has_asked = dist.get_rank() == 0, False
    handle.settle()
    has_followed = _digest(parameters())
    handle.loop.adapter.sync_model_weights()
    assert has_followed == _digest(parameters()), "masters have not reached the model"
    started_at, longest, usual = handle.step, 0.0, list[float]()
    while not handle.should_stop():
        if not has_asked and args.stop_file.exists():
            handle.request_stop("a file says so")
            has_asked = True
        began = time.monotonic()
        loss = take_step(handle.step + 1)
        seconds = time.monotonic() - began
        if handle.step > started_at + _FIRST_STEPS:
            longest = max(longest, seconds)
            usual.append(seconds)
        if loss is not None:  # on the last stage
            handle.log_step(loss=loss)
        if is_first:
            print(f"step {handle.step}", flush=True)
        time.sleep(args.step_seconds)
    handle.finish()
    with handle.averaged():
        checksums: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(checksums, _digest(parameters()))
    told = {
        "cluster": handle.cluster_id,
        "started_at": started_at,
        "step": handle.step,
        "checksum": " ".join(checksums),
        "longest": longest,
        "usual": sorted(usual)[len(usual) // 2] if usual else 0.0,
        **more(),
    }
    everyone = handle.gather(told)
    if is_first:
        Path(f"{args.out}.{handle.cluster_id}").write_text(json.dumps(everyone))
    handle.close()


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    hasher = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
