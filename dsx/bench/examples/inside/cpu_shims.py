"""What lets a script that asks for a GPU by name run on CPUs. Named in the table's rows.

They change where tensors are, never what is computed with them.
"""

# pyright: basic
from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any

import torch


def put(name: str) -> None:
    """Put one of these in place; KeyError for a name that is none, and nothing for an empty one."""
    if name:
        shims = (cuda_is_cpu, torchtitan_on_cpu, lightning_deepspeed_on_cpu)
        {shim.__name__: shim for shim in shims}[name]()


def cuda_is_cpu() -> None:
    """Let the script's "cuda:N" be the CPU, in `.to()` and DistributedDataParallel."""
    torch.cuda.set_device = lambda device: None
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    for owner in (torch.Tensor, torch.nn.Module):
        _on_cpu(owner)
    wrapper: Any = torch.nn.parallel.DistributedDataParallel
    original = wrapper.__init__

    def __init__(self: Any, module: Any, device_ids: Any = None, *args: Any, **kw: Any) -> None:
        original(self, module, None, *args, **kw)

    wrapper.__init__ = __init__


def _on_cpu(owner: Any) -> None:
    original = owner.to

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_cuda(one) else one for one in args)
        return original(self, *args, **kwargs)

    owner.to = to


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and str(device).startswith("cuda")


def torchtitan_on_cpu() -> None:
    """Let torchtitan, which takes "cuda" where it finds no accelerator, find the CPU."""
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    cpu: Any = torch.cpu
    nothing = {"total_memory": 1, "name": "CPU"}
    cpu.get_device_name = lambda device=None: "CPU"
    cpu.get_device_properties = lambda device=None: type("Properties", (), nothing)
    cpu.memory_stats = lambda device=None: {}
    cpu.empty_cache = cpu.reset_peak_memory_stats = lambda *args, **kwargs: None
    distributed: Any = torch.distributed
    barrier = distributed.barrier
    distributed.barrier = lambda group=None, device_ids=None, **kw: barrier(group, **kw)
    from torch.distributed.fsdp import FSDPModule

    divide = FSDPModule.set_gradient_divide_factor

    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        divide(self, factor)
        self.set_force_sum_reduction_for_comms(True)  # gloo has no reduction that multiplies, too

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor


def lightning_deepspeed_on_cpu() -> None:
    """Let Lightning's DeepSpeedStrategy, which starts on CUDA only, take the CPU."""
    sys.meta_path.insert(0, _AfterStrategy())


class _AfterStrategy(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "lightning.pytorch.strategies.deepspeed":
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            from lightning.pytorch.strategies.ddp import DDPStrategy  # pyright: ignore

            strategy = module.DeepSpeedStrategy
            strategy.setup_environment = DDPStrategy.setup_environment
            strategy.root_device = property(lambda self: torch.device("cpu", 0))
            module._validate_device_index_selection = lambda devices: None

        spec.loader.exec_module = exec_module
        return spec
