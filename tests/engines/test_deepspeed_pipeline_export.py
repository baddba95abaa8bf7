"""`dsx export` of a pipeline with a frozen parameter and a tied weight, cut over two ranks each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import dsx
from dsx.cli import app
from tests.distributed import run_distributed
from tests.engines.engines import ds_config, quiet
from tests.engines.pipelines import Block, train_batch
from tests.installed import needs
from tests.tiny import WIDTH

pytestmark = needs("deepspeed")

TIED, FROZEN = "tied_modules.ends.weight", "1.weight"


class Ends(nn.Module):
    """A layer with a tied weight and no other."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.weight))


class Frozen(Block):
    """A layer whose weight is not trained, with a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.weight.requires_grad_(False)
        self.register_buffer("count", torch.tensor([7.0]))


def save(base: str, num_clusters: int) -> dict[str, list[float]]:
    """Return the averaged model, of all stages."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    quiet()
    config = ds_config(1, "fp32", "diloco")
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 30}
    config["dsx"] = {"preset": "diloco", "clusters": clusters, "schedule": {"interval": 2}}
    dsx.init_distributed(config)
    # 42 elements on the first stage, whose ranks cut the tied 36 of them; 78 on the second
    layers = [
        *(TiedLayerSpec("ends", Ends, 0), LayerSpec(Frozen, 1)),
        *(LayerSpec(Block, 2), TiedLayerSpec("ends", Ends, 0)),
    ]
    model = PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss, partition_method="uniform")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    engine = dsx.initialize(model=model, config=config, optimizer=optimizer)[0]
    for step in range(1, 6):
        train_batch(engine, step)
    engine.save_checkpoint(base, tag="a", client_state={"mine": 1})
    _, state = engine.load_checkpoint(base, tag="a")
    assert state["mine"] == 1 and "universal_checkpoint_info" not in state
    everyone: list[Any] = [None] * dist.get_world_size()
    with engine.dsx.averaged():
        named = engine.module.state_dict().items()
        dist.all_gather_object(everyone, {n: w.flatten().tolist() for n, w in named})
    engine.dsx.close()
    return {name: values for part in everyone for name, values in part.items()}


def export(base: Path, *arguments: object) -> str:
    said = CliRunner().invoke(app, ["export", str(base), "--out", str(base / "out"), *arguments])
    assert said.exit_code == 0, said.output
    return said.output


def check(base: Path, expected: dict[str, list[float]]) -> None:
    export(base)
    found = load_file(base / "out" / "model.safetensors")
    assert {name: tensor.flatten().tolist() for name, tensor in found.items()} == expected
    assert {TIED, FROZEN, "1.count"} <= found.keys() and len(found) == 6
    export(base, "--format", "universal")
    for name in expected:
        path = base / "out" / "a" / "zero" / name
        whole = torch.load(path / "fp32.pt", weights_only=False)["param"]
        assert whole.flatten().tolist() == expected[name], name
        if name not in (FROZEN, "1.count"):
            moment = torch.load(path / "exp_avg.pt", weights_only=False)["param"]
            assert moment.shape == found[name].shape and moment.abs().max() > 0


def test_export_of_what_is_frozen_and_tied(tmp_path: Path) -> None:
    """Stages of two ranks: each cuts the tied weight at another place."""
    check(tmp_path, run_distributed(save, 4, str(tmp_path), 1, timeout_seconds=150)[0])


@pytest.mark.slow
def test_clusters_with_other_frozen_parameters_are_not_exported(tmp_path: Path) -> None:
    check(tmp_path, run_distributed(save, 4, str(tmp_path), 2, timeout_seconds=150)[0])
    layer = tmp_path / "cluster_1" / "a" / "layer_01-model_states.pt"
    held = torch.load(layer, weights_only=False)
    torch.save({**held, "weight": -held["weight"], "count": -held["count"]}, layer)
    said = CliRunner().invoke(app, ["export", str(tmp_path), "--out", str(tmp_path / "out")])
    assert said.exit_code == 2 and "1.weight, which is not trained, differs" in said.output
