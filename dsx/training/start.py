"""What happens when a run starts: its first record, and spans if a trace was asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsx.comm.world import World
from dsx.config.schema import DsxConfig, MetricsConfig
from dsx.core.engine import EngineAdapter
from dsx.core.exchange import Peers
from dsx.core.recorder import UNTRACED, Recorder
from dsx.telemetry.trace.recorder import Trace, trace_path


def start_record(adapter: EngineAdapter, world: World, config: DsxConfig) -> dict[str, Any]:
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
        "stages": adapter.stage.count,
        "parameters": [
            {p.name: list(p.shape) for p in parameters}
            for parameters in adapter.fragment_parameters
        ],
    }


def start_trace(metrics: MetricsConfig, world: World, adapter: EngineAdapter) -> Recorder:
    """Return this rank's recorder; the engine tells it of its steps from now on."""
    if not metrics.trace or metrics.dir is None:
        return UNTRACED
    path = trace_path(Path(metrics.dir), world.cluster_id, world.rank)
    peers = Peers(world.cluster_id, world.num_clusters)
    trace = Trace(path, world.session, peers, metrics.trace_steps, logs=world.rank == 0)
    adapter.trace_compute(trace)
    return trace
