"""What the patches of one process share: the configuration, the clusters, and the handle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dsx.comm.world import World
from dsx.config.flags import block_of_flags
from dsx.config.schema import DsxConfig, load_config
from dsx.engines.attach import init_distributed
from dsx.training.handle import Handle


class Run:
    """One process's part in the run; `handle` is there once model and optimizer are."""

    def __init__(self, block: dict[str, Any], config: DsxConfig, world: World) -> None:
        self.block = block
        self.config = config
        self.world = world
        self.handle: Handle | None = None

    @classmethod
    def join(cls, arguments: Sequence[str]) -> Run:
        """Read the flags and meet the other clusters; in values, too, `{cluster_id}` is filled."""
        block = block_of_flags(arguments)
        world = init_distributed(block)
        block = json.loads(json.dumps(block).replace("{cluster_id}", str(world.cluster_id)))
        return cls(block, load_config(block), world)

    def tell(self, text: str) -> None:
        """Print a line, on the cluster's first rank."""
        if self.world.rank == 0:
            print(f"dsx [cluster {self.world.cluster_id}]: {text}", flush=True)
