"""The device that a thread's calls to CUDA go to: it begins on the first one, whatever its rank.

A wait for an event, and the end of a stream's block, are calls to the device that the thread is on.
From a thread of a rank of another device they would make a context of this process on the first
one: half a GB, and so much of each rank of the machine, where one of them trains.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return what lets this thread's calls go to `device`, and then where they went before.

    Nothing where it is none of CUDA. Going back makes no context (as `torch.cuda.device` has it).
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
