"""The way in: `initialize` as `deepspeed.initialize`, `attach` and `attach_megatron`.

The "dsx" block is read from the same JSON that DeepSpeed gets. `init_distributed` makes one
torch.distributed world per cluster and must run before anything else touches torch.distributed;
`initialize` calls it where that has not happened.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dsx.comm.world import World, current_world, join
from dsx.config.flags import add_launch_arguments
from dsx.config.schema import ConfigError, DsxConfig, load_config, read_json
from dsx.engines.data_parallel import bare_parameters, find_placement
from dsx.engines.distributed_adam import placement_of
from dsx.engines.end_of_script import before_forward, before_zero_grad, follow_steps
from dsx.engines.joined import expect_joined, heal_before_forward
from dsx.engines.launch_settings import read_launch
from dsx.engines.settings import settings_of_modules, settings_of_optimizers
from dsx.engines.torch import (
    Optimizers,
    TorchAdapter,
    as_list,
    held_parameters,
    require_unattached,
)
from dsx.engines.torch_ranks import TorchRanksAdapter
from dsx.method.fragments import Fragmenter
from dsx.telemetry.stalls import stall_watch
from dsx.training.handle import Handle
from dsx.training.positions import Resumable
from dsx.training.seen_training import see_losses, see_tokens

Config = str | Path | Mapping[str, Any]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's arguments, and those of dsx that differ from launcher to launcher.

    Each overrides the key of the same name in the "clusters" part of the configuration.
    """
    import deepspeed

    deepspeed.add_config_arguments(parser)
    return add_launch_arguments(parser)


def init_distributed(config: Config, args: argparse.Namespace | None = None) -> World:
    """Create this cluster's world and meet the other clusters; return where this process is.

    `config` is the DeepSpeed JSON with a "dsx" block; `args` may carry what
    `add_config_arguments` has parsed. Raises ConfigError, RuntimeError (launcher environment
    missing, or torch.distributed already initialised) or PeerLost (a cluster that does not come).
    In a script that has imported deepspeed, DeepSpeed takes the same world at once, so that a
    `PipelineModule` can be built next.
    """
    meeting = read_launch(config, args)
    stall_watch()
    world = join(meeting)
    if "deepspeed" in sys.modules:
        from dsx.engines.deepspeed.engine import adopt_world

        adopt_world()
    return world


def initialize(
    args: argparse.Namespace | None = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
) -> tuple[Any, Any, Any, Any]:
    """Mirror `deepspeed.initialize`; the engine returned has a `Handle` as `engine.dsx`.

    A `PipelineModule` is built after `init_distributed`, and each of its stages is synchronised on
    its own. `training_data` that all clusters share is cut to this cluster's part, so that they
    never train on the same samples, and its position travels with the checkpoints; a dataloader of
    your own is yours to split (`dsx.data.ClusterShard`). `mpu` is sequence parallelism's, made
    after `init_distributed`. Other arguments that shape the world, the cluster's, are refused.
    """
    from dsx.engines.deepspeed.data import follow_training_data, share_training_data
    from dsx.engines.deepspeed.engine import start_engine
    from dsx.engines.deepspeed.features import refuse_arguments, refuse_pipeline
    from dsx.training.positions import DATA_POSITION

    _refuse_world_arguments(distributed_port, dist_init_required, mesh_param)
    config = config if config is not None else config_params
    source = config if config is not None else getattr(args, "deepspeed_config", None)
    if source is None:
        raise ValueError(
            "no DeepSpeed configuration: pass config=... or run with --deepspeed_config FILE"
        )
    document = read_json(source)
    refuse_arguments(document, mpu, training_data is not None)
    world = current_world() or init_distributed(source, args)
    refuse_pipeline(model, document)
    settings = load_config(source)
    if training_data is not None:
        training_data = share_training_data(training_data, world, settings.clusters.data)
    engine, wrapped, loader, scheduler = start_engine(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        collate_fn=collate_fn,
        config=str(config) if isinstance(config, Path) else config,
    )
    handle = _attach_deepspeed(engine, world, settings, {}, training_data is not None)
    if training_data is not None:
        position = follow_training_data(engine, training_data, handle)
        if position is not None:
            handle.track(**{DATA_POSITION: position})
            loader = loader and engine.training_dataloader
    return engine, wrapped, loader, scheduler


def attach(
    engine: Any,
    optimizer: Optimizers | None = None,
    *,
    config: Config,
    facts: Mapping[str, Any] | None = None,
) -> Handle:
    """Add outer training to an engine that exists; `engine.dsx` is the handle returned.

    `engine` is a DeepSpeedEngine, or an ordinary module together with its `optimizer`, or a list of
    those that share its parameters, each of which takes one step in every inner step. With several
    ranks per cluster the module is in DistributedDataParallel, or sharded by `fully_shard`; it may
    be compiled. The world must be `init_distributed`'s. Collective over all ranks of all clusters:
    it compares layouts and settings and takes cluster 0's weights everywhere. `facts` are plain
    values of your own that must be equal in all clusters, such as those of a schedule that dsx
    cannot see.
    """
    world = current_world()
    if world is None:
        raise RuntimeError("call dsx.init_distributed(config) before creating the engine")
    settings = load_config(config)
    if optimizer is None:
        return _attach_deepspeed(engine, world, settings, facts or {})
    _refuse_unused(settings)
    adapter = _torch_adapter(engine, optimizer, world, settings)
    told = {"facts": dict(facts)} if facts else {}
    compared = _settings_of(engine, as_list(optimizer))
    handle = Handle(adapter, world, settings, told, settings=compared)
    adapter.on_inner_step(handle.after_inner_step)
    follow_steps(handle, world, before_forward(engine), settings.checkpoints)
    heal_before_forward(engine, handle)
    see_tokens(handle.progress, engine, world.world_size)
    return handle


def attach_megatron(
    model_chunks: Any,
    optimizer: Any,
    *,
    config: Config,
    resume: tuple[str | Path, int] | None = None,
    begins_from: tuple[str | Path, Mapping[str, Any]] | None = None,
    facts: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    tracked: Mapping[str, Resumable] | None = None,
    vocab_size: int | None = None,
    own_part: str | Path | None = None,
) -> Handle:
    """Add outer training to a Megatron model and its optimizer; `optimizer.dsx` is the handle.

    `model_chunks`: the list of chunks that `get_megatron_optimizer` was given, or the only one.
    `config` holds the "dsx" block. `facts` must be equal in all clusters (a global batch size), and
    `settings`, too, but for those in `clusters.may_differ`; without them those of optimizer and
    model are compared. `vocab_size`: the tokenizer's, without the rows that pad the model's, for
    `dsx export --hf`. `own_part`: where Megatron's checkpoints and their tracker file are, for
    `checkpoints.remote` and what it has not ended. The world must be `init_distributed`'s, with
    Megatron's parallel state. Collective over all clusters: cluster 0's weights go everywhere.

    `resume=(directory, iteration)`, where Megatron has loaded that iteration before: the weights
    stay each cluster's own and the outer state is what `save_outer_state` has written there.
    `begins_from=(source, counters)`, where it has loaded a checkpoint of a run without dsx: all
    clusters must have the same weights, optimizer states and `counters`, plain values, or it is an
    error that names `source`. `tracked`: as `handle.track`, before `resume` is loaded. One that
    joins loads neither: `settle()`, then steps from `handle.step` on. ValueError: not served.
    """
    if resume and begins_from:
        raise ValueError(f"resume={resume!r} or begins_from={begins_from!r}: give one, not both")
    from dsx.engines.megatron.checkpoint import follow_own_part, load_outer_state
    from dsx.engines.megatron.engine import MegatronAdapter
    from dsx.engines.megatron.settings import settings_of_configs
    from dsx.engines.megatron.synchronous import begin_from

    world = current_world()
    if world is None:
        raise RuntimeError("call dsx.init_distributed(config) before Megatron's own initialisation")
    if hasattr(optimizer, "dsx"):
        raise ValueError("this optimizer has a dsx handle already: attach it once")
    resolved = _load_for_megatron(config, own_part)
    chunks = list(model_chunks) if isinstance(model_chunks, (list, tuple)) else [model_chunks]
    adapter = MegatronAdapter(chunks, optimizer, *_of_adapter(resolved), vocab_size)
    all_facts = {**adapter.facts(), **(facts or {})}
    compared = settings_of_configs(chunks, optimizer) if settings is None else settings
    handle = Handle(adapter, world, resolved, all_facts, bool(resume), compared, bool(begins_from))
    handle.track(**(tracked or {}))
    adapter.on_inner_step(handle.after_inner_step)
    follow_own_part(handle, own_part)
    if handle.joining.is_due:
        expect_joined(handle, before_zero_grad(optimizer))
    if resume:
        load_outer_state(handle, resume[1], resume[0])  # who joins only looks there
    elif begins_from and not handle.joining.is_due:
        begin_from(handle, *begins_from)
    follow_steps(handle, world, before_zero_grad(optimizer))
    optimizer.dsx = handle
    return handle


def _of_adapter(settings: DsxConfig) -> tuple[Fragmenter, bool, int]:
    method = settings.method
    return method.fragments, settings.state.is_on_host, method.schedule.backwards


def _settings_of(model: torch.nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    return {
        "optimizer": settings_of_optimizers(optimizers),
        "model": settings_of_modules(model.named_modules()),
    }


def _load_for_megatron(config: Config, own_part: str | Path | None) -> DsxConfig:
    from dsx.engines.megatron.refusals import refuse_settings

    resolved = load_config(config)
    _refuse_unused(resolved)
    refuse_settings(resolved, own_part)
    return resolved


def _refuse_unused(settings: DsxConfig, divides_data: bool = False) -> None:
    """Raise ConfigError for keys of data and validation that would have no effect."""
    data, validation = settings.clusters.data, settings.clusters.validation
    if data != "auto" and not divides_data:
        raise ConfigError(
            f"dsx.clusters.data={data!r} has no effect here: dsx divides the training_data of "
            "dsx.initialize, and that of Megatron-LM's loop; leave it out and divide your loader's "
            "data yourself (dsx.data.ClusterShard)"
        )
    if validation != "own":
        raise ConfigError(
            f"dsx.clusters.validation={validation!r} has no effect here: it is of Megatron-LM's "
            "own validation; leave it out and validate inside `with handle.averaged():`"
        )


def _attach_deepspeed(
    engine: Any,
    world: World,
    settings: DsxConfig,
    told: Mapping[str, Any],
    divides_data: bool = False,
) -> Handle:
    from dsx.engines.deepspeed.checkpoint import carry_outer_state
    from dsx.engines.deepspeed.engine import DeepSpeedAdapter
    from dsx.engines.deepspeed.first_use import settle_before_use
    from dsx.engines.deepspeed.joining import follow_joined
    from dsx.engines.deepspeed.preemption import end_when_told
    from dsx.engines.deepspeed.settings import settings_of_engine

    if not hasattr(engine, "basic_optimizer"):
        raise ValueError(
            f"{type(engine).__name__} is not a DeepSpeedEngine; for an ordinary module pass its "
            "optimizer, too: dsx.attach(model, optimizer, config=...)"
        )
    _refuse_unused(settings, divides_data)
    if hasattr(engine, "dsx"):
        raise ValueError("this engine has a dsx handle already: attach it once")
    adapter = DeepSpeedAdapter(engine, *_of_adapter(settings))
    facts = {
        **adapter.layout.facts(),
        "pipeline_stage": [adapter.stage.index, adapter.stage.count],
        "train_batch_size": engine.train_batch_size(),  # the mean is not weighted
        "facts": dict(told),
    }
    handle = Handle(
        adapter, world, settings, facts, settings=settings_of_engine(engine), waits=True
    )
    adapter.on_inner_step(handle.after_inner_step)
    carry_outer_state(engine, handle, world, end_when_told(engine, handle))
    follow_joined(engine, handle)
    settle_before_use(engine, handle)
    see_tokens(handle.progress, engine, world.world_size // engine.mp_world_size)
    see_losses(handle.progress, engine)
    engine.dsx = handle
    return handle


def _torch_adapter(
    model: torch.nn.Module, optimizer: Optimizers, world: World, settings: DsxConfig
) -> TorchAdapter:
    """Return the adapter for how the ranks of this cluster hold the model."""
    method, is_on_host = settings.method, settings.state.is_on_host
    optimizers = as_list(optimizer)
    trained = held_parameters(bare_parameters(model), optimizers)
    require_unattached(trained.values())
    ranks = world.world_size
    placement = placement_of(model, trained, optimizers, ranks)
    placement = placement or find_placement(model, trained, ranks, world.num_clusters)
    if placement is None:
        backwards = method.schedule.backwards
        return TorchAdapter(model, optimizer, method.fragments, backwards, is_on_host)
    return TorchRanksAdapter(model, optimizer, method, placement, is_on_host)


def _refuse_world_arguments(
    distributed_port: int | None, dist_init_required: bool | None, mesh_param: Any
) -> None:
    given = {
        "distributed_port": distributed_port,
        "dist_init_required": dist_init_required,
        "mesh_param": mesh_param,
    }
    for name, value in given.items():
        if value is not None:
            raise ValueError(
                f"dsx.initialize({name}={value!r}) is not served: dsx makes one world per cluster "
                "itself; leave it out"
            )
