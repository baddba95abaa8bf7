"""Build ranks of a DeepSpeed cluster: its own engine and ZeRO optimizer, on fakes.

The ranks of a cluster hold equal parts of the same tensors, the last one with padding: one engine
is built, and each rank's masters are located in it by the adapter, as seen from that rank. The
model has the names and shapes of Megatron's GPT; DeepSpeed looks at nothing else of it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from dsx.bench.dry_run.built_rank import BuiltRank
from dsx.bench.dry_run.stand_in import in_cluster, no_memory, seen_from
from dsx.config.schema import DsxConfig
from dsx.core.types import ParameterShape, Stage
from dsx.plan.gpt_shapes import GPT
from dsx.plan.model_files import Cluster

_SERVED = ("Adam", "AdamW")


class Shapes(nn.Module):
    """Parameters of a model's names and shapes, of the type that the engine would make them."""

    def __init__(self, shapes: Sequence[ParameterShape], dtype: torch.dtype) -> None:
        super().__init__()
        for shape in shapes:
            *path, name = shape.name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            weight = nn.Parameter(torch.empty(shape.shape, dtype=dtype))
            module.register_parameter(name, weight)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Shapes:
        return self  # type and place are right already, and fakes cannot be converted


def build_ranks(
    model: GPT, cluster: Cluster, document: Mapping[str, Any], config: DsxConfig
) -> list[BuiltRank]:
    """Return all ranks of a cluster; ValueError for what dsx does not serve.

    Once in a process: DeepSpeed keeps the groups of the first world that it is in.
    """
    kind = document.get("optimizer", {}).get("type", _SERVED[0])
    if kind not in _SERVED:
        raise ValueError(
            f"optimizer.type={kind!r}: dsx dry-run builds {' and '.join(_SERVED)} only; write one "
            "of them to see the rest of the run"
        )
    inner = {k: v for k, v in document.items() if k not in ("dsx", "optimizer", "scheduler")}
    with _quietly(), in_cluster(0, cluster.ranks), no_memory():
        from dsx.engines.deepspeed.engine import DeepSpeedAdapter, start_engine

        module = Shapes(model.stage(Stage()), _dtype(document))
        numel = sum(p.numel() for p in module.parameters())
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        engine = start_engine(model=module, optimizer=optimizer, config=inner)[0]
        method, is_on_host = config.method, config.state.is_on_host
        found: list[BuiltRank] = []
        for rank in range(cluster.ranks):
            with seen_from(rank):
                adapter = DeepSpeedAdapter(
                    engine, method.fragments, is_on_host, method.schedule.backwards
                )
                found.append(_read(adapter, rank, numel))
        engine.destroy()
    return found


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
