"""What a run's first record says: the model, the method and the ranks that its numbers are of."""

from __future__ import annotations

from typing import Any

from dsx.comm.world import World
from dsx.config.schema import DsxConfig
from dsx.engines.masters import Backend


def start_record(backend: Backend, world: World, config: DsxConfig) -> dict[str, Any]:
    """Return the record, of step 0, which a resumed run keeps beside its own.

    `parameters` are the whole shapes by fragment, of this rank's pipeline stage alone: those of
    the other stages are known by the `numel` of their syncs.
    """
    return {
        "step": 0,
        "preset": config.preset,
        "axes": config.axes,
        "num_clusters": world.num_clusters,
        "ranks": world.world_size,
        "stages": backend.stage.count,
        "parameters": [
            {p.name: list(p.shape) for p in parameters}
            for parameters in backend.fragment_parameters
        ],
    }
