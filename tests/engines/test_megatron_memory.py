"""`dsx memory` against what small models of megatron-core hold: shapes, inner and outer bytes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from dsx.config.schema import load_config
from dsx.core.types import Stage
from dsx.plan.memory.plan import plan_stage
from dsx.plan.model_files import Batch
from dsx.plan.stage_weights import stage_shapes
from tests.distributed import run_by_parts
from tests.engines import megatrons
from tests.engines.megatron_plans import planned
from tests.engines.megatrons import Kind, build_engine, dsx_config, needs_megatron, train_step

pytestmark = needs_megatron

KINDS = [
    Kind(tensor=2),
    Kind(pipeline=2, is_tied=True),
    Kind(precision="bf16", is_sharded=True, layers_per_stage=4),
    Kind(precision="bf16", pipeline=2),
    Kind(),
    Kind(context=2),
    Kind(family="qwen3"),
    Kind(experts=4, expert_parallel=2),
    Kind(experts=4, expert_parallel=2, precision="bf16", is_sharded=True, layers_per_stage=4),
    Kind(pipeline=2, layers_per_stage=3, first_stage=2),
    Kind(pipeline=2, layers_per_stage=4, chunks=2),
]
CHANGES: dict[str, Any] = {
    "compression": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"}
}


def held(kind: Kind) -> dict[str, Any]:
    """What a rank of this kind has: names and shapes, bytes by purpose, the plan in the handle."""
    engine = build_engine(kind, **CHANGES)
    for step in range(1, 10):
        train_step(engine, step)
    adapter = engine.handle.loop.adapter
    weights = [p for chunk in engine.chunks for p in chunk.parameters()]
    moments, masters = 0, 0
    for optimizer in getattr(engine.optimizer, "chained_optimizers", [engine.optimizer]):
        states = optimizer.optimizer.state.values()
        named = [(n, t) for s in states for n, t in s.items() if torch.is_tensor(t)]
        moments += sum(t.numel() * t.element_size() for n, t in named if n.startswith("exp_avg"))
        groups = optimizer.optimizer.param_groups
        if kind.precision == "bf16":
            masters += sum(4 * p.numel() for group in groups for p in group["params"])
    chunks = engine.chunks
    buffers = [b for chunk in chunks for b in chunk.buffers + chunk.expert_parallel_buffers]
    return {
        "stage": (adapter.stage.index, adapter.stage.count),
        "shapes": {p.name: p.shape for ps in adapter.fragment_parameters for p in ps},
        "weights": sum(p.numel() * p.element_size() for p in weights),
        "gradients": sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers),
        "masters": masters,
        "moments": moments,
        "outer": asdict(engine.handle.memory),
        "given": sum(engine.handle.loop.state.allocator.given.values()),
    }


def all_held(kinds: list[Kind]) -> list[dict[str, Any]]:
    return [held(kind) for kind in kinds]


@pytest.mark.ci
def test_plans_are_what_small_models_hold() -> None:
    ranks = run_by_parts(all_held, 4, of=KINDS, timeout_seconds=200, engine="megatron")
    config = load_config(dsx_config(**CHANGES))
    for index, kind in enumerate(KINDS):
        model, cluster = planned(kind, 2)
        for number in range(kind.pipeline):
            stage = Stage(number, kind.pipeline)
            plan = plan_stage(model, cluster, stage, config, Batch(megatrons.LENGTH, 2), False)
            mine = [r[index] for r in ranks if r[index]["stage"] == (number, kind.pipeline)]
            largest = max(mine, key=lambda r: sum(r["outer"].values()))
            together = {part.name: part.shape for part in stage_shapes(model, cluster, stage)}
            assert together == largest["shapes"], str(kind)
            for rank in mine:
                assert rank["given"] == pytest.approx(sum(rank["outer"].values()), rel=0.05)
            itemsize = 2 if kind.precision == "bf16" else 4
            assert plan.inner.weights == plan.numel * itemsize == largest["weights"], str(kind)
            # the distributed optimizer pads every parameter to 64 elements, here a lot
            slack = 1.2 if kind.is_sharded else 1.0
            for name in ("gradients", "moments", "masters"):
                told = getattr(plan.inner, name)
                assert told <= largest[name] * 1.02, (str(kind), name)
                assert largest[name] <= slack * told, (str(kind), name)
            assert vars(plan.outer) == largest["outer"], str(kind)
