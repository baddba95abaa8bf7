"""Build ranks of a DeepSpeed cluster: its own engine and ZeRO optimizer, on fakes.

The ranks of a stage hold equal parts of the same tensors, the last one with padding: one engine is
built, and each rank's masters are located in it by the adapter, as seen from that rank. The model
has the names and shapes of Megatron's GPT; DeepSpeed looks at nothing else of it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.deepspeed_module import module_of
from dsx.bench.dry_run.stand_in import in_cluster, no_memory, seen_from
from dsx.config.schema import DsxConfig
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
    ranks = range(stage * together, (stage + 1) * together)
    found: list[BuiltRank] = []
    with _quietly(), in_cluster(ranks[0], cluster.ranks), _fresh_groups(), no_memory():
        from dsx.engines.deepspeed.engine import DeepSpeedAdapter, adopt_world, start_engine

        adopt_world()
        module = module_of(model, cluster, _dtype(document))
        numel = sum(p.numel() for p in module.parameters())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        given: dict[str, Any] = {"model": module, "optimizer": optimizer, "config": inner}
        if cluster.context > 1:
            given["mpu"] = _sequence_mpu(cluster.context)
        with _elsewhere():
            engine = start_engine(**given)[0]
        method, is_on_host = config.method, config.state.is_on_host
        for rank in ranks:
            with seen_from(rank):
                adapter = DeepSpeedAdapter(
                    engine, method.fragments, is_on_host, method.schedule.backwards
                )
                found.append(_read(adapter, rank, numel))
        engine.destroy()
    return found


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
