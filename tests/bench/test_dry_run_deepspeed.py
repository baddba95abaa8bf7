"""`dsx dry-run` and `dsx memory` of DeepSpeed's own layouts, against small runs of the same.

Pipelines, sequence parallelism and hpZ, in clusters of four ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.config.schema import load_config
from dsx.core.types import ParameterShape, Stage
from dsx.plan.deepspeed_json import read_cut
from dsx.plan.deepspeed_layers import METHODS, _balanced, _uniform
from dsx.plan.gpt_shapes import GPT
from dsx.plan.memory.plan import plan_stage
from dsx.plan.model_files import Batch, Cluster
from tests.bench.test_dry_run import compare, figures_of_run, follow, told
from tests.distributed import run_distributed
from tests.engines.deepspeed_ranks import sequence_mpu
from tests.engines.engines import ACCUMULATION, allow_fp16, ds_config, quiet
from tests.engines.test_deepspeed_memory import BLOCK
from tests.installed import needs

RANKS = 4
SIZES: dict[str, Any] = {
    "layers": 5, "hidden": 32, "ffn": 80, "heads": 4, "groups": 4, "vocabulary": 60,
    "positions": 20,
}  # fmt: skip


class Kind(NamedTuple):
    """ZeRO's stage and DeepSpeed's types; how a cluster is cut."""

    stage: int
    precision: str
    partition: str | None = None
    is_tied: bool = True
    sequence: int = 1
    hpz: int = 1

    def document(self) -> dict[str, Any]:
        config = {**ds_config(self.stage, self.precision, "diloco"), "dsx": BLOCK}
        if self.partition is not None:
            config["pipeline"] = {"stages": 2, "partition": self.partition}
        if self.sequence > 1:
            config["sequence_parallel_size"] = self.sequence
        if self.hpz > 1:
            own = {"zero_hpz_partition_size": self.hpz, "stage3_param_persistence_threshold": 0}
            config["zero_optimization"] |= own
        return config

    def model(self) -> GPT:
        return GPT(**SIZES, is_tied=self.is_tied)


USUAL = [
    Kind(0, "bf16", "type:transformer"),
    Kind(1, "bf16", "parameters"),
    Kind(1, "bf16+fp32", "uniform", is_tied=False),
    Kind(3, "bf16", sequence=2),
    Kind(3, "bf16", hpz=2),
]
MORE = [
    Kind(0, "fp32", "parameters"),
    Kind(0, "fp16", "uniform"),
    Kind(1, "fp32", "type:transformer"),
    Kind(0, "fp32", sequence=2),
    Kind(1, "bf16", sequence=2),
]


class Layer(nn.Module):
    """Parameters of the names and shapes that are given; what comes in goes on, a little more."""

    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.parts = nn.ParameterDict({k: nn.Parameter(torch.ones(v)) for k, v in shapes.items()})

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.stack([p.square().mean() for p in self.parts.values()]).sum()


class TransformerLayer(Layer):
    """One that "type:transformer" counts."""


class Part(nn.Module):
    """A module of a whole model: its own parameters, then its children's."""

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self._parameters.values():
            x = x + parameter.float().square().mean()
        for child in self.children():
            x = child(x)
        return x


def whole(shapes: Sequence[ParameterShape]) -> Part:
    """Return all of a model, by its names."""
    model = Part()
    for shape in shapes:
        *path, name = shape.name.split(".")
        module: nn.Module = model
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, Part())
            module = module.get_submodule(part)
        module.register_parameter(name, nn.Parameter(torch.ones(shape.shape)))
    return model


def named(shapes: list[ParameterShape], prefix: str) -> dict[str, tuple[int, ...]]:
    return {s.name.replace(".", "_"): s.shape for s in shapes if s.name.startswith(prefix)}


def pipeline(kind: Kind) -> Any:
    """The layers of the model in a row, as a script would write them."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    shapes = kind.model().stage(Stage())
    words = {"weight": (SIZES["vocabulary"], SIZES["hidden"])}
    positions = {"weight": (SIZES["positions"], SIZES["hidden"])}
    tied = TiedLayerSpec("words", Layer, words, tied_weight_attr="parts.weight")
    layers = [tied if kind.is_tied else LayerSpec(Layer, words), LayerSpec(Layer, positions)]
    for number in range(SIZES["layers"]):
        own = named(shapes, f"decoder.layers.{number}.")
        layers.append(LayerSpec(TransformerLayer, own))
    layers.append(LayerSpec(Layer, named(shapes, "decoder.final_layernorm")))
    layers.append(tied if kind.is_tied else LayerSpec(Layer, words))
    return PipelineModule(
        layers,
        num_stages=2,
        partition_method=kind.partition,
        loss_fn=lambda x, y: F.mse_loss(x.float(), y.float()),
    )


def held(kind: Kind) -> dict[str, Any]:
    """What a rank of a run of this kind has and sends."""
    from deepspeed.utils import groups

    from dsx.engines.deepspeed.engine import adopt_world
    from dsx.engines.deepspeed.parameters import stepping_optimizer

    config = kind.document()
    if current_world() is None:
        dsx.init_distributed(config)
    adopt_world()
    groups.mpu = None  # of the engine before
    model = whole(kind.model().stage(Stage())) if kind.partition is None else pipeline(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    given: dict[str, Any] = {"model": model, "config": config, "optimizer": optimizer}
    if kind.sequence > 1:
        given["mpu"] = sequence_mpu(kind.sequence)
    engine = dsx.initialize(**given)[0]
    last = follow(engine.dsx)
    x = torch.ones(3, 4, dtype=next(engine.module.parameters()).dtype)
    weights = 0
    for _ in range(9):
        if kind.partition is None:
            for _ in range(ACCUMULATION):
                engine.backward(engine(x).mean())
                weights = weight_bytes(engine)  # a step lets go of hpZ's copy
                engine.step()
        else:
            engine.train_batch(iter([(x, x)] * ACCUMULATION))
    states = [(k, v) for s in stepping_optimizer(engine).state.values() for k, v in s.items()]
    sums = getattr(engine.optimizer, "fp32_groups_gradients_flat", [])
    found = {
        **figures_of_run(engine.dsx, last),
        "weights": weights or weight_bytes(engine),
        "moments": sum(4 * v.numel() for k, v in states if k.startswith("exp_avg")),
        "sums": sum(s.numel() * s.element_size() for s in sums),
    }
    engine.dsx.close()
    engine.destroy()
    return found


def weight_bytes(engine: Any) -> int:
    """Bytes of a rank's weights, and of hpZ's copy of them."""
    own = [getattr(p, "ds_tensor", p) for p in engine.module.parameters()]
    own += [getattr(p, "ds_secondary_tensor", None) for p in engine.module.parameters()]
    return sum(p.numel() * p.element_size() for p in own if p is not None)


def all_held(kinds: Sequence[Kind]) -> list[dict[str, Any]]:
    quiet()
    allow_fp16()
    return [held(kind) for kind in kinds]


def all_dry(kinds: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """The same of every rank of one cluster, built without the others, one after another."""
    from dsx.bench.dry_run.deepspeed import build_ranks
    from dsx.bench.dry_run.figures import figures_of

    config, found = load_config({"dsx": BLOCK}), []
    for kind in kinds:
        cluster = Cluster(**read_cut(kind.document(), RANKS)._asdict())
        of_kind: list[dict[str, Any]] = []
        for stage in range(cluster.pipeline):
            built = build_ranks(kind.model(), cluster, kind.document(), config, stage)
            of_kind += told(figures_of(built, config, has_accelerators=False))
        found.append(of_kind)
    return found


def hold_to_runs(
    kinds: Sequence[Any],
    all_held: Callable[[Sequence[Any]], list[dict[str, Any]]],
    compare_memory: Callable[[Any, list[dict[str, Any]]], None],
) -> None:
    """Compare what each rank of two clusters has with what is built alone, and with plans."""
    runs = run_distributed(all_held, 2 * RANKS, kinds, timeout_seconds=500)
    (dry,) = run_distributed(all_dry, 1, kinds, timeout_seconds=240)
    for index, kind in enumerate(kinds):
        for number, run in enumerate(runs):
            compare(dry[index][number % RANKS], run[index], number // RANKS)
        compare_memory(kind, [run[index] for run in runs[:RANKS]])


@needs("deepspeed")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(USUAL, marks=pytest.mark.ci, id="usual"),
        pytest.param(MORE, marks=pytest.mark.slow, id="more"),
    ],
)
def test_layouts_are_what_runs_have(kinds: Sequence[Kind]) -> None:
    hold_to_runs(kinds, all_held, compare_memory)


def compare_memory(kind: Any, ranks: list[dict[str, Any]], rel: float = 0.02) -> None:
    """Hold `dsx memory` to what the ranks of a cluster have, but for padding, and `rel`."""
    cluster = Cluster(**read_cut(kind.document(), RANKS)._asdict())
    config, together = load_config({"dsx": BLOCK}), cluster.ranks_per_stage
    for number in range(cluster.pipeline):
        stage = Stage(number, cluster.pipeline)
        plan = plan_stage(kind.model(), cluster, stage, config, Batch(20, 3), False)
        own = ranks[number * together : (number + 1) * together]
        largest = max(own, key=lambda r: sum(r["memory"].values()))
        inner = {
            "weights": plan.inner.weights,
            "moments": plan.inner.moments,
            "sums": plan.inner.gradients - 2 * plan.numel if cluster.accumulated else 0,
        }
        expected = {key: size for key, size in inner.items() if key in largest}
        found = {key: largest[key] for key in expected}
        expected |= vars(plan.outer)
        assert {**found, **largest["memory"]} == pytest.approx(expected, rel=rel)


@needs("deepspeed")
def test_stages_are_cut_as_deepspeed_cuts_them() -> None:
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    generator = torch.Generator().manual_seed(0)
    for count in range(1, 15):
        for stages in range(1, count + 1):
            weighed = torch.randint(0, 4, (count,), generator=generator).tolist()
            assert _balanced(weighed, stages) == list(partition_balanced(weighed, stages))
            assert _uniform(count, stages) == partition_uniform(count, stages)
    assert METHODS[0] == "parameters"  # a PipelineModule's own default
