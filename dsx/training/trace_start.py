"""Who records, and where: the setting "trace" of a run."""

from __future__ import annotations

from pathlib import Path

from dsx.comm.world import World
from dsx.config.schema import MetricsConfig
from dsx.core.exchange import Peers
from dsx.engines.masters import Backend
from dsx.telemetry.trace.recorder import UNTRACED, Recorder, Trace, trace_path


def start_trace(metrics: MetricsConfig, world: World, backend: Backend) -> Recorder:
    """Return this rank's recorder; the engine tells it of its steps from now on."""
    if not metrics.trace or metrics.dir is None:
        return UNTRACED
    path = trace_path(Path(metrics.dir), world.cluster_id, world.rank)
    peers = Peers(world.cluster_id, world.num_clusters)
    trace = Trace(path, world.session, peers, metrics.trace_steps, logs=world.rank == 0)
    backend.trace_compute(trace)
    return trace
