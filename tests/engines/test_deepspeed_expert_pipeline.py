"""DeepSpeed's experts in a pipeline: against plain torch, plain DeepSpeed, a resume, an export.

Two stages of three layers: two with experts each, and at both ends one that moves its input by a
buffer and by a frozen parameter, which no optimizer holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.engines.deepspeed.engine import adopt_world, start_engine
from dsx.engines.export import ExportOptions, export_checkpoint
from tests.distributed import run_distributed
from tests.engines.deepspeed_ranks import (
    ALONE,
    EXPERTS,
    STREAMING,
    WIDTH,
    ExpertLayer,
    param_groups,
    sample,
)
from tests.engines.deepspeed_ranks import Kind as Divided
from tests.engines.engines import ACCUMULATION, ds_config, max_bit16_difference, quiet, weights
from tests.engines.pipelines import NUM_STAGES, StageReference
from tests.engines.resumes import differences, inner_snapshot, snapshot
from tests.installed import needs
from tests.reference import Recipe
from tests.reference_schedules import Clock
from tests.tiny import H

pytestmark = needs("deepspeed")

STOP, NUM_STEPS = 7, 10  # with transfers under way on one stage
NUM_LAYERS = 6
TRAINED = [[["1"], ["2"]], [["3"], ["4"]]]  # layers of the fragments of the stages


class Kind(NamedTuple):
    """ZeRO's stage, and DeepSpeed's types."""

    stage: int
    precision: str = "fp32"

    def __str__(self) -> str:
        return f"zero{self.stage}-{self.precision}"


FEW = [Kind(1)]
MORE = [Kind(0), Kind(1, "bf16"), Kind(1, "bf16+fp32")]


class Shift(nn.Module):
    """What is not trained, other values in each place."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.register_buffer("moved", torch.full((WIDTH,), 0.01 * (place + 1)))
        self.frozen = nn.Parameter(torch.full((WIDTH,), 0.02 * (place + 1)), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.moved + self.frozen).to(x.dtype)


def layers(size: int) -> list[nn.Module]:
    """Return the model's layers; experts are divided over `size` ranks, 0: in plain torch."""
    experts = [ExpertLayer(size) for _ in range(NUM_LAYERS - 2)]
    return [Shift(0), *experts, Shift(NUM_LAYERS - 1)]


def whole_model(seed: int) -> nn.Sequential:
    """Return the model of one process; its names are the pipeline's."""
    model = nn.Sequential(*layers(0))
    generator = torch.Generator().manual_seed(seed)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    return model


def whole_names(named: dict[str, Any], rank: int, size: int) -> dict[str, Any]:
    """Return what a rank holds by the whole model's names."""
    local = EXPERTS // size
    pattern = r"(deepspeed_experts\.)(\d+)"
    return {
        re.sub(pattern, lambda m: f"{m[1]}{int(m[2]) + rank * local}", name): value
        for name, value in named.items()
    }


def data_place() -> tuple[int, int]:
    """Return this rank's place in its stage, and the ranks of a stage."""
    count = dist.get_world_size() // NUM_STAGES
    return dist.get_rank() % count, count


def arguments_of(kind: Kind, seed: int | None, **block: Any) -> dict[str, Any]:
    from deepspeed.pipe import PipelineModule

    config = ds_config(kind.stage, kind.precision, "diloco")
    config["train_micro_batch_size_per_gpu"] = 2
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    config["dsx"] = {"clusters": clusters, **(block or STREAMING)}
    if current_world() is None:
        dsx.init_distributed(config)
    adopt_world()
    seed = current_world().cluster_id if seed is None else seed
    rank, size = data_place()
    module = PipelineModule(
        layers(size), num_stages=NUM_STAGES, partition_method="uniform",
        loss_fn=lambda x, y: F.mse_loss(x.float(), y.float()),
    )  # fmt: skip
    values = whole_model(seed).state_dict()
    own = {name: values[whole] for whole, name in named_alike(module, rank, size)}
    module.load_state_dict(own)
    optimizer = torch.optim.AdamW(param_groups(Divided("experts", 0), module), lr=0.01)
    return {"model": module, "config": config, "optimizer": optimizer}


def named_alike(module: Any, rank: int, size: int) -> Sequence[tuple[str, str]]:
    names = {name: name for name in module.state_dict()}
    return list(whole_names(names, rank, size).items())


def initialize(kind: Kind, seed: int | None = None, **block: Any) -> Any:
    return dsx.initialize(**arguments_of(kind, seed, **block))[0]


def initialize_plain(kind: Kind, seed: int) -> Any:
    given = arguments_of(kind, seed, **ALONE)
    config = {k: v for k, v in given.pop("config").items() if k != "dsx"}
    return start_engine(config=config, dist_init_required=False, **given)[0]


def end(engine: Any) -> None:
    if hasattr(engine, "dsx"):
        engine.dsx.close()
    engine.destroy()


def take_step(engine: Any, step: int, cluster: int) -> float:
    dtype = next(engine.module.parameters()).dtype
    rank, _ = data_place()
    parts = [sample(cluster, step, rank * ACCUMULATION + m) for m in range(ACCUMULATION)]
    return engine.train_batch(iter([(x.to(dtype), y) for x, y in parts])).item()


def whole_weights(engine: Any) -> dict[str, Tensor]:
    """Return the cluster's weights by the whole model's names, fp32. Collective."""
    own = whole_names(weights(engine), *data_place())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found: dict[str, Tensor] = {}
    for rank in everyone:
        for name, weight in rank.items():
            assert name not in found or torch.equal(found[name], weight), name
            found[name] = weight
    return found


def reference(num_parts: int) -> list[dict[str, Tensor]]:
    """Return every cluster's weights after the same training in plain torch, fp32."""
    models = [whole_model(0) for _ in range(2)]
    local = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in models]
    optimizers = [torch.optim.AdamW(p.values(), lr=0.01) for p in local]
    recipe = Recipe([], H, True, 2, 0.3, "nesterov", 0.4, 0.9)
    stages = []
    for index, cut in enumerate(TRAINED):
        fragments = [[n for n in local[0] if n.split(".")[0] in held] for held in cut]
        own = [{n: p[n] for f in fragments for n in f} for p in local]
        with torch.no_grad():
            clock = Clock(len(cut))
            stages.append(
                StageReference(replace(recipe, fragments=fragments), own, clock, index=index)
            )
    for step in range(1, NUM_STEPS + 1):
        before = [{n: p.detach().clone() for n, p in theta.items()} for theta in local]
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            parts = [sample(cluster, step, part) for part in range(num_parts)]
            (sum(F.mse_loss(model(x), y) for x, y in parts) / num_parts).backward()
            optimizer.step()
        with torch.no_grad():
            for stage in stages:
                stage.boundary(step, before)
    return [{n: p.detach().clone() for n, p in theta.items()} for theta in local]


def train_and_resume(kind: Kind, base: str) -> dict[str, Any]:
    """Train past a save, and from it in a new engine; return what differs, and what is held."""
    engine = initialize(kind)
    cluster = engine.dsx.cluster_id
    for step in range(1, NUM_STEPS + 1):
        take_step(engine, step, cluster)
        if step == STOP:
            saved = snapshot(engine)  # waits for the means, or they would be made again
            engine.save_checkpoint(base, tag="at")
    found: dict[str, Any] = {
        "cluster": cluster, "stage": engine.stage_id, "syncs": engine.dsx.totals.syncs,
        "weights": whole_weights(engine), "apart": max_bit16_difference(engine),
    }  # fmt: skip
    ended = snapshot(engine)
    found["layout"] = [
        (s.name, s.start, s.numel) for f in engine.dsx.loop.adapter.fragments for s in f.layout
    ]
    engine.dsx.finish()
    with engine.dsx.averaged():
        found["averaged"] = whole_weights(engine)
    engine.save_checkpoint(base, tag="end")
    engine.dsx.gather("all clusters have saved")
    if cluster == 0 and dist.get_rank() == 0:
        folder = Path(base) / "exported"
        export_checkpoint(ExportOptions(Path(base), folder, "safetensors", "end", "fp32", 1.0), str)
        found["exported"] = load_file(next(folder.glob("*.safetensors")))
    end(engine)
    engine = initialize(kind)
    engine.load_checkpoint(base, tag="at")
    found["loaded"] = differences(snapshot(engine), saved)
    for step in range(STOP + 1, NUM_STEPS + 1):
        take_step(engine, step, cluster)
    found["resumed"] = differences(snapshot(engine), ended)
    end(engine)
    return found


def train_all(kinds: list[Kind], base: str) -> list[dict[str, Any]]:
    quiet()
    found = [train_and_resume(kind, f"{base}/{kind}") for kind in kinds]
    expected = reference(data_place()[1] * ACCUMULATION)
    return [{**one, "expected": expected[one["cluster"]]} for one in found]


def train_few(base: str) -> tuple[list[dict[str, Any]], str]:
    return train_all(FEW, base), refusal_of_uneven_stages()


def refusal_of_uneven_stages() -> str:
    """Return what is said of a pipeline whose last stage has no experts."""
    from deepspeed.pipe import PipelineModule

    given = arguments_of(Kind(1), None)
    plain = [*layers(1)[:3], Shift(3), nn.Linear(WIDTH, WIDTH), Shift(5)]
    given["model"] = PipelineModule(
        plain, num_stages=NUM_STAGES, partition_method="uniform", loss_fn=F.mse_loss
    )
    with pytest.raises(ValueError, match="experts in a pipeline") as refused:
        dsx.initialize(**given)
    return str(refused.value)


def check(kind: Kind, ranks: list[dict[str, Any]]) -> None:
    most = 1e-6 if kind.precision == "fp32" else 0.1  # Adam of small gradients in bf16
    worst = 0.0
    for rank in ranks:
        assert rank["loaded"] == [] and rank["resumed"] == [] and rank["apart"] == 0.0
        assert rank["syncs"] > 2
        for name, value in rank["expected"].items():
            worst = max(worst, (rank["weights"][name] - value).abs().max().item())
        for name, value in ranks[0]["averaged"].items():
            assert torch.equal(rank["averaged"][name], value), name
    print(f"{kind}: {worst:.1e}")
    assert worst <= most
    held: dict[str, int] = {}
    for rank in ranks[: len(ranks) // 2]:
        for name, _, numel in rank["layout"]:
            held[name] = held.get(name, 0) + numel
    assert held == {n: v.numel() for n, v in ranks[0]["expected"].items()}
    exported = ranks[0]["exported"]
    whole = whole_model(0).state_dict()
    assert exported.keys() == whole.keys()
    for name, value in exported.items():
        is_trained = name in ranks[0]["expected"]
        same = ranks[0]["averaged"][name] if is_trained else whole[name]
        dtype = torch.bfloat16 if kind.precision.startswith("bf16") else torch.float32
        assert torch.equal(value.to(dtype).float(), same.to(dtype).float()), name


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Any:
    base = str(tmp_path_factory.mktemp("few"))
    return run_distributed(train_few, 4, base, timeout_seconds=200)


@pytest.mark.parametrize("kind", FEW, ids=str)
def test_equals_plain_torch_and_resumes(kind: Kind, few: Any) -> None:
    check(kind, [kinds[FEW.index(kind)] for kinds, _ in few])


def test_stages_of_which_one_has_no_experts_are_refused(few: Any) -> None:
    """On every rank, where DeepSpeed would wait forever."""
    for _, message in few:
        assert "stage 0 has layers of ['ep_size_1'], stage 1 of no experts" in message
        assert "give every stage a layer of experts with the same ep_size" in message


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_experts_over_two_ranks_of_a_stage(tmp_path: Path) -> None:
    kinds = FEW + MORE
    trained = run_distributed(train_all, 8, kinds, str(tmp_path), timeout_seconds=280)
    for index, kind in enumerate(kinds):
        check(kind, [rank[index] for rank in trained])


def compare(kinds: list[Kind], base: str) -> list[dict[str, Any]]:
    """Train plain DeepSpeed; one cluster alone, and from its checkpoint, must equal it."""
    quiet()
    return [compare_one(kind, f"{base}/{kind}") for kind in kinds]


def compare_one(kind: Kind, base: str) -> dict[str, Any]:
    steps, middle = range(1, 2 * H + 2), H + 1
    adopt_alone()
    engine = initialize_plain(kind, 0)
    begin, losses = inner_snapshot(engine), []
    for step in steps:
        losses.append(take_step(engine, step, 0))
        if step == middle:
            engine.save_checkpoint(base, tag="plain")
    ended = inner_snapshot(engine)
    end(engine)
    engine = initialize(kind, 0, **ALONE)
    ours = [take_step(engine, step, 0) for step in steps]
    found = {
        "losses": ours == losses, "moved": bool(differences(begin, ended)),
        "differ": differences(inner_snapshot(engine), ended), "syncs": engine.dsx.totals.syncs,
    }  # fmt: skip
    end(engine)
    engine = initialize(kind, 1, **ALONE)
    engine.load_checkpoint(base)
    for step in range(middle + 1, 2 * H + 2):
        take_step(engine, step, 0)
    found["from plain"] = differences(inner_snapshot(engine), ended)
    end(engine)
    return found


def adopt_alone() -> None:
    """Make the one cluster's world."""
    if current_world() is None:
        dsx.init_distributed({"dsx": ALONE})


@pytest.mark.ci
def test_one_cluster_equals_plain_deepspeed(tmp_path: Path) -> None:
    """Two stages of two ranks, each of which has half of the experts."""
    kinds = FEW + MORE
    trained = run_distributed(compare, 4, kinds, str(tmp_path), timeout_seconds=280)
    for rank in trained:
        for kind, found in zip(kinds, rank, strict=True):
            assert found["losses"] and found["moved"] and found["syncs"] == 2, str(kind)
            assert found["differ"] == [] and found["from plain"] == [], str(kind)
