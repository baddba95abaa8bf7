"""dsx: train one DeepSpeed or Megatron run across sites joined by slow links.

Public API: `initialize` (as `deepspeed.initialize`), `attach` (for an engine that exists),
`attach_megatron`, `init_distributed`, `add_config_arguments`, `add_launch_arguments`,
`load_config`, `preset`; `SimulatedClusters` runs any method with C clusters in one process.
Importing dsx imports neither deepspeed nor megatron.
"""

from __future__ import annotations

from dsx.attach import (
    add_config_arguments,
    add_launch_arguments,
    attach,
    attach_megatron,
    init_distributed,
    initialize,
)
from dsx.comm.base import PeerLost
from dsx.comm.world import World
from dsx.config import ConfigError, load_config, preset
from dsx.handle import Handle
from dsx.judge import NonFiniteError, ParityError
from dsx.method import Method, SettingWarning
from dsx.simulate import SimulatedClusters

__all__ = [
    "ConfigError",
    "Handle",
    "Method",
    "NonFiniteError",
    "ParityError",
    "PeerLost",
    "SettingWarning",
    "SimulatedClusters",
    "World",
    "add_config_arguments",
    "add_launch_arguments",
    "attach",
    "attach_megatron",
    "init_distributed",
    "initialize",
    "load_config",
    "preset",
]
__version__ = "0.1.0"
