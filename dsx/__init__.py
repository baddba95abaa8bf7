"""dsx: train one DeepSpeed or Megatron run across sites joined by slow links.

Public is what `__all__` names (docs/reference.md): `initialize` (as `deepspeed.initialize`),
`attach` (for an engine that exists), `attach_megatron` and `init_distributed`, with the `Handle`
and the `World` that they give; `load_config`, `preset` and `register` for methods;
`TorchCheckpoints`, which saves and loads what `attach` was given in plain PyTorch;
`SimulatedClusters`, which runs any method with C clusters in one process; and what is raised.
Importing dsx imports neither deepspeed nor megatron, nor torch before a name is used: commands that
only plan start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dsx.comm.world import World
    from dsx.config.flags import add_launch_arguments
    from dsx.config.schema import ConfigError, load_config, preset
    from dsx.core.renamed import RenamedWarning
    from dsx.core.transport import PeerLost
    from dsx.engines.attach import (
        add_config_arguments,
        attach,
        attach_megatron,
        init_distributed,
        initialize,
    )
    from dsx.engines.simulated import SimulatedClusters
    from dsx.engines.torch_checkpoints import TorchCheckpoints
    from dsx.method.choices import register
    from dsx.method.method import Method, SettingWarning
    from dsx.outer.recovery import NonFiniteError, ParityError
    from dsx.training.handle import Handle

__all__ = [
    "ConfigError",
    "Handle",
    "Method",
    "NonFiniteError",
    "ParityError",
    "PeerLost",
    "RenamedWarning",
    "SettingWarning",
    "SimulatedClusters",
    "TorchCheckpoints",
    "World",
    "add_config_arguments",
    "add_launch_arguments",
    "attach",
    "attach_megatron",
    "init_distributed",
    "initialize",
    "load_config",
    "preset",
    "register",
]
__version__ = "0.3.0.dev0"

_NAMES = {  # no public name may be that of a module here, which would take its place
    "engines.attach": (
        "add_config_arguments",
        "attach",
        "attach_megatron",
        "init_distributed",
        "initialize",
    ),
    "core.renamed": ("RenamedWarning",),
    "core.transport": ("PeerLost",),
    "comm.world": ("World",),
    "config.flags": ("add_launch_arguments",),
    "config.schema": ("ConfigError", "load_config", "preset"),
    "training.handle": ("Handle",),
    "outer.recovery": ("NonFiniteError", "ParityError"),
    "method.choices": ("register",),
    "method.method": ("Method", "SettingWarning"),
    "engines.simulated": ("SimulatedClusters",),
    "engines.torch_checkpoints": ("TorchCheckpoints",),
}


def __getattr__(name: str) -> Any:
    """Import what a public name stands for, when it is first asked for."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"dsx.{module}"), name)
    if name == "comm":  # for `dsx.comm.world.current_world()` before anything else was used
        import_module("dsx.comm.world")
        return import_module("dsx.comm")
    raise AttributeError(f"module 'dsx' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
