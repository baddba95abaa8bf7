"""`dsx memory` of a DeepSpeed JSON: what ranks of small models really hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.config.schema import load_config
from dsx.core.types import Stage
from dsx.engines.deepspeed.parameters import stepping_optimizer
from dsx.plan.gpt_shapes import GPT
from dsx.plan.memory.plan import plan_stage
from dsx.plan.model_files import Batch, Cluster
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet
from tests.installed import needs

pytestmark = needs("deepspeed")

MODEL = GPT(layers=3, hidden=32, ffn=80, heads=4, groups=4, vocabulary=60, positions=20)
KINDS = [(stage, precision) for precision in ("fp32", "bf16") for stage in (0, 1, 2, 3)]
BLOCK = {
    "preset": "diloco",
    "clusters": {"num_clusters": 2, "deadline_seconds": 30},
    "schedule": {"interval": 4},
    "fragments": {"by": "layer", "num_fragments": 2},
}


class Shapes(nn.Module):
    """Parameters of a GPT's names and shapes, without the GPT."""

    def __init__(self) -> None:
        super().__init__()
        for shape in MODEL.stage(Stage()):
            *path, name = shape.name.split(".")
            module: nn.Module = self
            for part in path:
                if part not in dict(module.named_children()):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(name, nn.Parameter(torch.ones(shape.shape)))

    def forward(self) -> Tensor:
        return torch.stack([p.float().square().mean() for p in self.parameters()]).sum()


def held(stage: int, precision: str) -> dict[str, Any]:
    config = {**ds_config(stage, precision, "diloco"), "dsx": BLOCK}
    if current_world() is None:
        dsx.init_distributed(config)
    model = Shapes()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
    for _ in range(9):
        engine.backward(engine())
        engine.step()
    parameters = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    states = [(k, v) for s in stepping_optimizer(engine).state.values() for k, v in s.items()]
    result = {
        "weights": sum(p.numel() * p.element_size() for p in parameters),
        "moments": sum(4 * v.numel() for k, v in states if k.startswith("exp_avg")),
        "outer": vars(engine.dsx.memory),
        "given": sum(engine.dsx.loop.state.allocator.given.values()),
    }
    engine.dsx.close()
    engine.destroy()
    return result


def all_held() -> list[dict[str, Any]]:
    quiet()
    return [held(*kind) for kind in KINDS]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_distributed(all_held, 4, timeout_seconds=200)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_plans_are_what_small_models_hold(
    kind: tuple[int, str], ranks: list[list[dict[str, Any]]]
) -> None:
    stage, precision = kind
    cluster = Cluster(data=2, is_bf16=precision == "bf16", zero_stage=stage)
    plan = plan_stage(MODEL, cluster, Stage(), load_config({"dsx": BLOCK}), Batch(20, 1), False)
    own = [rank[KINDS.index(kind)] for rank in ranks[:2]]
    largest = max(own, key=lambda r: (r["outer"]["anchor"], r["outer"]["work_space"]))
    expected = {
        "weights": plan.inner.weights,
        "moments": plan.inner.moments,
        **{f"outer {name}": size for name, size in vars(plan.outer).items()},
    }
    found = {
        "weights": largest["weights"],
        "moments": largest["moments"],
        **{f"outer {name}": size for name, size in largest["outer"].items()},
    }
    assert found == pytest.approx(expected, rel=0.01)  # DeepSpeed pads
    for rank in own:
        assert rank["given"] == pytest.approx(sum(rank["outer"].values()), rel=0.05)
