"""Build ranks of a DeepSpeed cluster: its own engine and ZeRO optimizer, on fakes.

Ranks that hold equal parts of the same tensors, the last one with padding, are those of a stage,
of a layer's experts, or of AutoTP's slices. For each such set one engine is built, and each rank's
masters are located in it by the adapter, as seen from that rank. The model has the names and shapes
of Megatron's GPT, or of a Hugging Face decoder where AutoTP cuts it; DeepSpeed looks at nothing
else of it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.deepspeed_module import module_of
from dsx.bench.dry_run.stand_in import in_cluster, no_memory, seen_from
from dsx.config.schema import DsxConfig
from dsx.core.types import ParameterShape
from dsx.engines.deepspeed.layout import require_even_slices
from dsx.plan.gpt_shapes import GPT
from dsx.plan.model_files import Cluster

_SERVED = ("Adam", "AdamW")


def build_ranks(
    model: GPT,
    cluster: Cluster,
    document: Mapping[str, Any],
    config: DsxConfig,
    stage: int = 0,
) -> list[BuiltRank]:
    """Return all ranks of a pipeline stage; ValueError for what dsx does not serve."""
    kind = document.get("optimizer", {}).get("type", _SERVED[0])
    if kind not in _SERVED:
        raise ValueError(
            f"optimizer.type={kind!r}: dsx dry-run builds {' and '.join(_SERVED)} only; write one "
            "of them to see the rest of the run"
        )
    inner = {k: v for k, v in document.items() if k not in ("dsx", "optimizer", "scheduler")}
    together = cluster.ranks_per_stage
    left = list(range(stage * together, (stage + 1) * together))
    found: dict[int, BuiltRank] = {}
    shapes: list[Sequence[ParameterShape]] = []  # of AutoTP's slices, by tensor-parallel rank
    while left:
        built, alike = _build_alike(model, cluster, inner, config, left[0])
        found |= {one.rank: one for one in built}
        left = [rank for rank in left if rank not in found]
        shapes.append(alike)
    if cluster.tensor > 1:
        require_even_slices(shapes)
    return [found[rank] for rank in sorted(found)]


def _build_alike(
    model: GPT, cluster: Cluster, inner: dict[str, Any], config: DsxConfig, first: int
) -> tuple[list[BuiltRank], Sequence[ParameterShape]]:
    """Return a rank and those that hold what it does, and the shapes of what they train."""
    found: list[BuiltRank] = []
    with ExitStack() as stack:
        for context in (_quietly(), in_cluster(first, cluster.ranks), _fresh_groups()):
            stack.enter_context(context)
        from dsx.engines.deepspeed.engine import DeepSpeedAdapter, adopt_world, start_engine

        adopt_world()
        if cluster.tensor > 1:  # of a mesh, whose ranks are values
            groups = importlib.import_module("deepspeed.utils.groups")
            groups._init_tp_mesh_device(cluster.tensor)
        stack.enter_context(no_memory())
        module = module_of(model, cluster, _dtype(inner))
        optimizer = torch.optim.AdamW(_groups(module, model), lr=1e-4)
        given: dict[str, Any] = {"model": module, "optimizer": optimizer, "config": dict(inner)}
        if cluster.context > 1:
            given["mpu"] = _sequence_mpu(cluster.context)
        with _elsewhere():
            engine = start_engine(**given)[0]
        numel = sum(p.numel() for p in module.parameters())
        method, is_on_host = config.method, config.state.is_on_host
        shapes: Sequence[ParameterShape] = ()
        for rank in _ranks_alike(cluster, first):
            with seen_from(rank):
                adapter = DeepSpeedAdapter(
                    engine, method.fragments, is_on_host, method.schedule.backwards
                )
                found.append(_read(adapter, rank, numel))
                shapes = adapter.layout.shapes
        engine.destroy()
    return found, shapes


def _ranks_alike(cluster: Cluster, first: int) -> list[int]:
    """Return the ranks that hold what the first of them does, in DeepSpeed's groups' order."""
    if cluster.expert > 1:
        groups = importlib.import_module("deepspeed.utils.groups")
        group: Any = groups._get_expert_data_parallel_group(f"ep_size_{cluster.expert}")
        return list(torch.distributed.get_process_group_ranks(group))
    together = cluster.ranks_per_stage
    begin = first // together * together
    return list(range(first, begin + together, cluster.tensor))


def _groups(module: Any, model: GPT) -> Any:
    """Return what the optimizer steps, experts in groups of their own as DeepSpeed asks."""
    parameters = list(module.parameters())
    if model.experts is None:
        return parameters
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    return split({"params": parameters, "name": "all"})


def _sequence_mpu(size: int) -> Any:
    """Return DeepSpeed's mpu of sequence parallelism, made for this world."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(size)
    return parallel_state_sp


@contextmanager
def _elsewhere() -> Generator[None, None, None]:
    """Let the engine start as on the run's machines: in fp16, whatever this one's accelerator does.

    A pipeline's engine prints zeros for the parameters of all stages: two sums over its ranks, read
    back from a tensor that has no values here.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    fake: Any = FakeTensor
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    tolist, is_supported = fake.tolist, accelerator.is_fp16_supported

    def zeros(tensor: Any) -> Any:
        is_pair = tensor.dtype == torch.int64 and tuple(tensor.shape) == (2,)
        return [0, 0] if is_pair else tolist(tensor)

    fake.tolist, accelerator.is_fp16_supported = zeros, lambda: True
    try:
        yield
    finally:
        fake.tolist, accelerator.is_fp16_supported = tolist, is_supported


@contextmanager
def _fresh_groups() -> Generator[None, None, None]:
    """Let DeepSpeed know no groups of a world before, and forget those of this one."""
    comm, groups, sequence = (
        importlib.import_module(f"deepspeed.{name}")
        for name in ("comm.comm", "utils.groups", "runtime.sequence_parallel.parallel_state_sp")
    )
    kept = [(module, dict(vars(module))) for module in (comm, groups, sequence)]
    for module, values in kept:
        for name, value in values.items():
            if isinstance(value, dict) and name.startswith("_") and name.isupper():
                setattr(module, name, {})
            elif isinstance(value, torch.distributed.ProcessGroup):
                setattr(module, name, None)
    comm.__dict__["cdb"] = None
    try:
        yield
    finally:
        for module, values in kept:
            vars(module).update(values)


def _read(adapter: Any, rank: int, numel: int) -> BuiltRank:
    num_tensors = [len(parameters) for parameters in adapter.fragment_parameters]
    stage, fragments = adapter.stage, adapter.fragments
    return BuiltRank(rank, stage, numel, fragments, num_tensors, adapter.buffer_bytes)


def _dtype(document: Mapping[str, Any]) -> torch.dtype:
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if document.get(name, {}).get("enabled"):
            return dtype
    return torch.float32


@contextmanager
def _quietly() -> Generator[None, None, None]:
    """Leave out what DeepSpeed prints in starting, and give it the launcher's variables."""
    before = {name: os.environ.get(name) for name in ("LOCAL_RANK", "DS_ACCELERATOR")}
    os.environ["LOCAL_RANK"] = "0"
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            importlib.import_module("deepspeed")  # makes its logger
            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
