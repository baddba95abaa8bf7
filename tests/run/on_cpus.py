"""Run a script with Accelerate on CPUs as on GPUs, without which it does not shard.

python on_cpus.py SCRIPT [arguments], with ACCELERATE_TORCH_DEVICE=cpu.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

import torch.distributed as dist
from accelerate import state


def prepare_backend(self: Any, *args: Any, **kwargs: Any) -> Any:
    return "gloo", state.DistributedType.MULTI_GPU


if __name__ == "__main__":
    assert dist.is_initialized()
    state.PartialState._prepare_backend = prepare_backend
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
