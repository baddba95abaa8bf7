"""For tests: Lightning starts DeepSpeed on CUDA only, and with this on CPUs, too.

Python imports a module of this name as it starts, from PYTHONPATH; no script knows of it.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import Any


class AfterStrategy(MetaPathFinder):
    """Lets Lightning's DeepSpeedStrategy take a CPU once it has been imported."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name not in (
            "lightning.pytorch.strategies.deepspeed",
            "pytorch_lightning.strategies.deepspeed",
        ):
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            import torch

            ddp: Any = sys.modules[f"{name.rpartition('.')[0]}.ddp"]
            strategy = module.DeepSpeedStrategy
            strategy.setup_environment = ddp.DDPStrategy.setup_environment
            strategy.root_device = property(lambda self: torch.device("cpu", 0))
            module._validate_device_index_selection = lambda devices: None

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, AfterStrategy())
