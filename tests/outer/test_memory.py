"""The memory of outer training, predicted from numbers, is what a run then holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dsx.config.schema import ConfigError, load_config, preset
from dsx.core.units import format_bytes
from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel
from dsx.outer.memory import predict
from tests.held_memory import held_bytes, scratch_bytes
from tests.levels import in_turn
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, mean_loss

CODECS: dict[str, dict[str, Any]] = {
    "int4": {"type": "quantized"},
    "int4, feedback": {"type": "quantized", "error_feedback": "fp32"},
    "ternary, bf16": {"type": "quantized", "wire": "ternary", "error_feedback": "bf16"},
    "2bit, two legs": {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"},
    "low rank": {"type": "low_rank", "rank": 6, "error_feedback": "int8"},
    "top-k": {"type": "top_k", "k": 3, "chunk": 100, "error_feedback": "bf16"},
    "random top-k": {"type": "random_top_k", "chunk": 100, "error_feedback": "int8"},
}


class Net(nn.Module):
    """Two matrices that can be coded, one in factors; an embedding; vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(40, 48)
        self.layers = nn.ModuleList([nn.Linear(48, 64), nn.Linear(64, 48)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def require_predicted(run: Simulated) -> None:
    for loop in run.loops:
        counts = [len(parameters) for parameters in loop.adapter.fragment_parameters]
        wire = [gather.wire for gather in loop.matrix_gathers]
        fragments = loop.adapter.fragments
        memory = predict(run.method, fragments, counts, wire, run.num_clusters)
        # prediction is of the cluster that holds most: owners of slices differ by one group
        held = held_bytes(loop.state)
        assert 0 <= memory.total - memory.work_space - memory.channels - held <= memory.codec * 0.4
        assert scratch_bytes(loop.state) <= memory.work_space
        named = [loop.state.named_state(f.id) for f in fragments]
        anchors = sum(4 * state["anchor"].numel() for state in named if "anchor" in state)
        assert memory.anchor == anchors
        for prefix, size in (("outer.", memory.outer_optimizer), ("codec.", memory.codec)):
            tensors = [t for state in named for n, t in state.items() if n.startswith(prefix)]
            own = sum(t.numel() * t.element_size() for t in tensors)
            assert own <= size <= own + 0.2 * memory.codec
    assert str(memory).startswith(f"{format_bytes(memory.total)} (")


def test_where_state_lives_is_a_choice() -> None:
    block = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    assert load_config({"dsx": block}).state.device == "masters"
    assert load_config({"dsx": {**block, "state": {"device": "host"}}}).state.device == "host"
    with pytest.raises(
        ConfigError, match="dsx.state.device='gpu' must be 'masters', 'host' or 'disk'"
    ):
        load_config({"dsx": {**block, "state": {"device": "gpu"}}})
    model = nn.Linear(3, 3, device="meta")
    adapters = [TorchAdapter(model, sgd(model), WholeModel(), 1, host) for host in (False, True)]
    assert [adapter.device.type for adapter in adapters] == ["meta", "cpu"]


@pytest.mark.parametrize("name", ALL_CASES)
def test_of_every_method(name: str) -> None:
    run = Simulated(TinyNet(), sgd, ALL_CASES[name].method(2), 2)
    for _ in range(14):
        run.train_step(mean_loss)
    require_predicted(run)


@pytest.mark.parametrize(("codec", "num_clusters"), [*in_turn(CODECS, [2, 5]), ("low rank", 9)])
def test_of_every_codec(codec: str, num_clusters: int) -> None:
    method = preset("diloco", num_clusters, schedule={"interval": 2}, compression=CODECS[codec])
    run = Simulated(Net(), sgd, method, num_clusters)
    for _ in range(4):
        run.train_step(lambda model, c, t: model(torch.tensor([c, t])))
    require_predicted(run)
