"""What is written when a run starts: what it is, its first record, spans if they are asked for."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

from dsx.comm.versions import own_versions
from dsx.comm.world import World
from dsx.config.metrics import MetricsConfig
from dsx.config.notices import without_addresses
from dsx.config.plain import told
from dsx.config.schema import DsxConfig
from dsx.core.engine import EngineAdapter
from dsx.core.recorder import UNTRACED, Recorder
from dsx.method.fragments import fewer_than_usual
from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory
from dsx.outer.whole_matrices import tell_what_is_factored
from dsx.telemetry.behind import Behind
from dsx.telemetry.metrics import metrics_path
from dsx.telemetry.trace.parts import trace_path
from dsx.telemetry.trace.recorder import Trace
from dsx.training.planned import tell_of_plan

logger = logging.getLogger(__name__)


def tell_of_start(loop: OuterLoop, world: World, memory: OuterMemory, config: DsxConfig) -> None:
    """Log how the method meets this model; collective over the ranks of a cluster of stages."""
    method, adapter, resources = loop.method, loop.adapter, loop.state.resources
    tell_of_plan(adapter, world, config)
    counts = [len(adapter.fragments)]
    if adapter.stage.count > 1 and method.fragments.num_fragments == "auto":
        own = [adapter.stage.index, *counts]
        by_stage = dict(world.in_cluster().gather("fragments of each stage", own))
        counts = [by_stage[stage] for stage in sorted(by_stage)]
    if world.rank or world.cluster_id:
        return
    if fewer := fewer_than_usual(method.fragments, counts):
        logger.info(fewer)
    tell_what_is_factored(method, adapter)
    logger.info("outer state of this rank, on %s: %s", adapter.device, memory)
    logger.info("coding threads of this rank (coding.cores): %s", resources.cores)
    if method.compression.takes_turns:
        side = resources.side
        where = "the host" if side is None else f"{side.device}, in a stream of their own"
        logger.info("factors are made on %s (coding.factors)", where)


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


def start_facts(adapter: EngineAdapter, world: World, config: DsxConfig) -> dict[str, Any]:
    """Return what run.json says of a start: of the program, the settings and the machine."""
    resolved = config.block()
    resolved["clusters"] |= world.clusters
    facts = {
        "session": world.session,
        "command": sys.argv,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "num_clusters": world.num_clusters,
        "ranks": world.world_size,
        "stages": adapter.stage.count,
        "device": str(adapter.device),
        "versions": own_versions(),
        "config": {"given": told(config.given), "resolved": resolved},
    }
    return without_addresses(facts, config.metrics.notices)


def files_of_run(config: DsxConfig, cluster: int) -> dict[str, str]:
    """Return the names of what a cluster writes into the run's folder, by kind."""
    here = Path()
    names = {"metrics": metrics_path(here, cluster).name}
    if config.metrics.trace:
        names["trace"] = f"trace.cluster_{cluster}.rank_*.jsonl.gz"
    for name in config.metrics.to:
        names[name] = f"{name}/cluster_{cluster}" + (".db" if name == "mlflow" else "")
    return names


def start_trace(
    metrics: MetricsConfig, world: World, adapter: EngineAdapter, behind: Behind
) -> Recorder:
    """Return this rank's recorder; the engine tells it of its steps from now on."""
    if not metrics.trace or metrics.dir is None:
        return UNTRACED
    path = trace_path(Path(metrics.dir), world.cluster_id, world.rank)  # `begin` names another
    steps, logs = metrics.trace_steps, world.rank == 0
    most_bytes = int(metrics.trace_megabytes * 1e6)
    trace = Trace(path, world.session, world.seat, steps, logs, behind, most_bytes)
    adapter.trace_compute(trace)
    return trace
