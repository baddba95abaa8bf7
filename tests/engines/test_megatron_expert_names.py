"""Experts by name: every rank lists the same parameters, whichever class of experts holds them."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed import run_distributed
from tests.engines.megatrons import needs_megatron

pytestmark = needs_megatron

EXPERTS, SLICES, TENSOR = 2, 2, 2
# of SequentialMLP, of Transformer Engine's grouped linears, of one stacked weight
KINDS = {
    "sequential": "local_experts.0.linear_fc1.weight",
    "grouped": "linear_fc1.weight0",
    "stacked": "weight1",
}


def layer_of(tensors: dict[str, tuple[int, ...]], is_reduced_apart: bool = True) -> Any:
    """A model of one layer with these parameters, as modules in modules."""
    model = nn.Module()
    for name, shape in tensors.items():
        module = model
        *path, last = f"decoder.layers.0.{name}".split(".")
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = getattr(module, part)
        parameter = nn.Parameter(torch.zeros(shape))
        parameter.allreduce = not (is_reduced_apart and ".experts." in name)  # type: ignore[attr-defined]
        module.register_parameter(last, parameter)
    model.decoder.layers.get_submodule("0").layer_number = 3  # type: ignore[union-attr, assignment]
    return model


def name_everything() -> dict[str, Any]:
    from dsx.bench.megatron_on_cpu import install

    install()
    from dsx.engines.megatron.parameters import Coordinates, name_parameters, stage_shapes

    def listed(model: Any, *numbers: int, counts: tuple[int, ...]) -> tuple[list[str], list[str]]:
        expert, cut, tensor = zip(numbers, counts, strict=True)
        place = Coordinates(tensor, (0, 1), (0, 1), (0, 1), expert, cut)
        found = name_parameters([model], list(model.parameters()), place)
        return [p.name for p in found], [p.name for p in stage_shapes(found, place)]

    def message_of(model: Any, *counts: int) -> str:
        with pytest.raises(ValueError) as refused:
            listed(model, 0, 0, 0, counts=counts)
        return str(refused.value)

    everywhere = list(product(range(EXPERTS), range(SLICES), range(TENSOR)))
    counts = EXPERTS, SLICES, TENSOR
    names: dict[str, Any] = {}
    for kind, own in KINDS.items():
        both = {"mlp.router.weight": (4, 2), f"mlp.experts.{own}": (2, 2)}
        shared = {"mlp.shared_experts.linear_fc1.weight": (2, 2)}
        model = layer_of({**both, **shared})
        names[kind] = [listed(model, *ranks, counts=counts) for ranks in everywhere]
    whole = layer_of({"mlp.experts.weight1": (2, 2)}, is_reduced_apart=False)
    names["alone"] = listed(whole, 0, 0, 0, counts=(1, 1, 1))
    names["bias"] = message_of(layer_of({"mlp.experts.linear_fc2.bias0": (2,)}), *counts)
    names["not apart"] = message_of(whole, *counts)
    other = layer_of({"mlp.linear.weight": (2, 2)})
    for parameter in other.parameters():
        parameter.allreduce = False
    names["apart"] = message_of(other, *counts)
    return names


def test_experts_by_name() -> None:
    (names,) = run_distributed(name_everything, 1, engine="megatron")
    for kind, own in KINDS.items():
        prefix = f"decoder.layers.2.mlp.experts.{own}"
        parts = [f"{prefix}.experts_{e}.slice_{s}" for e in range(EXPERTS) for s in range(SLICES)]
        dense = ["decoder.layers.2.mlp.router.weight"]
        dense_too = ["decoder.layers.2.mlp.shared_experts.linear_fc1.weight"]
        for number, (held, of_stage) in enumerate(names[kind]):
            assert of_stage == dense + parts + dense_too
            assert held == [*dense, parts[number // TENSOR], *dense_too]
    assert names["alone"] == (["decoder.layers.2.mlp.experts.weight1"],) * 2
    assert "linear_fc2.bias0 is the same on all expert-tensor-parallel ranks" in names["bias"]
    assert "over expert-data-parallel ranks alone" in names["apart"]
    assert "mlp.experts.weight1 over the ranks of all experts" in names["not apart"]
