"""What the patches of one process share: the configuration, the clusters, and the handle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dsx.comm.cluster_world import limit_collectives
from dsx.comm.world import World
from dsx.config.flags import block_of_flags
from dsx.config.schema import DsxConfig, load_config
from dsx.config.sections import OF_DATA
from dsx.engines.attach import init_distributed
from dsx.training.handle import Handle
from megatron_patches.timeouts import timeout_of

if TYPE_CHECKING:
    from megatron_patches.data import Division


class Run:
    """One process's part in the run; `handle` is there once model and optimizer are.

    `data` and `validation` are of Megatron-LM's loop: they are not in the block that is handed on.
    """

    division: Division

    def __init__(self, block: dict[str, Any], config: DsxConfig, world: World) -> None:
        self.data, self.validation = config.clusters.data, config.clusters.validation
        clusters = {k: v for k, v in block["dsx"]["clusters"].items() if k not in OF_DATA}
        self.block = {**block, "dsx": {**block["dsx"], "clusters": clusters}}
        self.config = config
        self.world = world
        self.handle: Handle | None = None
        self.own_checkpoints: str | None = None  # of a cluster that joins and loads none of them
        self.saved_iteration: int | None = None  # None, too, where the last save was not done
        self.has_loaded_own = False  # whether what Megatron has loaded was saved across clusters

    @classmethod
    def join(cls, arguments: Sequence[str]) -> Run:
        """Read the flags and meet the other clusters; in values, too, `{cluster_id}` is filled."""
        block = block_of_flags(arguments)
        world = init_distributed(block)
        timeout = timeout_of(arguments)
        if timeout is not None:
            limit_collectives(timeout)
        block = json.loads(json.dumps(block).replace("{cluster_id}", str(world.cluster_id)))
        return cls(block, load_config(block), world)

    def tell(self, text: str) -> None:
        """Print a line, on the cluster's first rank."""
        if self.world.rank == 0:
            print(f"dsx [cluster {self.world.cluster_id}]: {text}", flush=True)
