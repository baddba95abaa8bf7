"""What `dsx memory` says is what a run holds: told by the allocator, and by every tensor found."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dsx.comm.in_process import InProcessTransport
from dsx.config.schema import PRESETS, preset
from dsx.engines import simulated
from dsx.outer.loop import OuterLoop
from dsx.outer.memory import OuterMemory, predict
from dsx.outer.resources import Resources
from tests.compress.side_streams import on_the_side
from tests.levels import in_turn
from tests.simulated import Simulated

WIDTH = 384
NOT_LOOKED_INTO = (ModuleType, type, nn.Module, torch.optim.Optimizer, InProcessTransport)
LINK = {"step_seconds": 1.0, "transfer_seconds": 1.0}
LAYERWISE = {"interval": 3, "backward_seconds": [1.0] * 5, "transfer_seconds": [1.0] * 5}
HALVES = {"by": "layer", "num_fragments": 2}
CONTROL = {"rank": 48, "max_rank": 48, "min_interval": 2, "step_seconds": 1.0, "round_seconds": 3.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "streaming_diloco": {"schedule": {"interval": 4}, "fragments": HALVES, "delay": {"steps": 2}},
    "cocodc": {
        "schedule": {"interval": 6, **LINK}, "fragments": HALVES, "delay": {"steps": 1},
    },
    "dilocox": {
        "schedule": {"interval": 3}, "fragments": HALVES, "control": CONTROL,
        "compression": {"dense_rounds": 1},
    },
    "dreamddp": {"schedule": LAYERWISE},
    "recommended": {"schedule": {"interval": 4}, "fragments": HALVES},
}  # fmt: skip
CODECS: dict[str, dict[str, Any]] = {
    "int4": {"type": "quantized"},
    "int8, feedback": {"type": "quantized", "wire": "int8", "error_feedback": "fp32"},
    "ternary, stochastic int8": {
        "type": "quantized", "wire": "ternary", "error_feedback": "int8", "feedback_decay": 0.9,
    },
    "fp8": {"type": "quantized", "wire": "fp8", "rounding": "stochastic"},
    "2bit, two legs": {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"},
    "3bit, int8": {
        "type": "quantized", "wire": "3bit", "mean_wire": "1bit", "error_feedback": "int8",
    },
    "low rank": {"type": "low_rank", "rank": 48, "error_feedback": "bf16"},
    "low rank, exact": {"type": "low_rank", "rank": 16, "factor_wire": "fp32"},
    "top-k": {"type": "top_k", "error_feedback": "bf16"},
    "random top-k": {"type": "random_top_k", "error_feedback": "bf16"},
}  # fmt: skip


class Net(nn.Module):
    """0.7 M parameters in matrices, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def loss(model: nn.Module, cluster: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * cluster + step)
    return model(torch.randn(2, WIDTH, generator=generator))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def tensors_in(found: object) -> Iterator[Tensor]:
    """Every tensor that can be reached, but for modules, optimizers and the variables of code."""
    seen, left = {id(found)}, [found]
    while left:
        here = left.pop()
        if isinstance(here, Tensor):
            yield here
        if isinstance(here, FunctionType):
            within: list[Any] = [here.__closure__, here.__defaults__]
        else:
            within = gc.get_referents(here)
        for other in within:
            if id(other) not in seen and not isinstance(other, NOT_LOOKED_INTO):
                seen.add(id(other))
                left.append(other)


def held(loop: OuterLoop, run: Simulated) -> int:
    """Bytes of all memory that tensors of the loop's parts lie in, without the engine's."""
    engines = {p.untyped_storage().data_ptr() for m in run.models for p in m.parameters()}
    parts = (
        loop.state,
        loop.matrix_gathers,
        loop.measurements,
        loop.recovery,
        loop._outer_step,
        loop.launches.host_copies,
    )
    memory = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors_in(parts)
        if tensor.untyped_storage().data_ptr() not in engines
    }
    return sum(memory.values())


def predicted(loop: OuterLoop, num_clusters: int) -> OuterMemory:
    counts = [len(parameters) for parameters in loop.adapter.fragment_parameters]
    wire = [gather.wire for gather in loop.matrix_gathers]
    return predict(loop.method, loop.adapter.fragments, counts, wire, num_clusters)


def require_predicted(run: Simulated) -> None:
    run.finish()  # anchors are hashed
    for loop in run.loops:
        memory, given = predicted(loop, run.num_clusters), loop.state.allocator.given
        assert sum(given.values()) == pytest.approx(memory.total, rel=0.05)
        assert held(loop, run) == pytest.approx(memory.total, rel=0.05)
        assert sum(given.values()) <= memory.total * 1.001
        for purpose, size in given.items():
            assert size == pytest.approx(vars(memory)[purpose], rel=0.05), purpose


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_of_every_preset_holds_what_is_predicted(name: str) -> None:
    run = Simulated(
        Net(), sgd, preset(name, 2, **SETTINGS.get(name, {"schedule": {"interval": 2}})), 2
    )
    for _ in range(13):
        run.train_step(loss)
    require_predicted(run)


@pytest.mark.parametrize(("codec", "num_clusters"), in_turn(CODECS, [5, 2, 1]))
def test_a_run_of_every_codec_holds_what_is_predicted(codec: str, num_clusters: int) -> None:
    method = preset("diloco", num_clusters, schedule={"interval": 1}, compression=CODECS[codec])
    run = Simulated(Net(), sgd, method, num_clusters)
    for _ in range(2):
        run.train_step(loss)
    require_predicted(run)


def test_what_owners_keep_is_predicted_beside_codes_of_launches() -> None:
    method = preset(
        "diloco", 4, schedule={"interval": 2}, delay={"type": "shift", "steps": 1},
        compression=CODECS["2bit, two legs"],
    )  # fmt: skip
    run = Simulated(Net(), sgd, method, 4)
    for _ in range(5):
        run.train_step(loss)
    require_predicted(run)


@pytest.mark.parametrize("outer_steps", [1, 2])
@pytest.mark.parametrize("codec", ["int8, feedback", "top-k", "random top-k"])
def test_codes_of_launches_are_predicted(codec: str, outer_steps: int) -> None:
    method = preset(
        "eager", 2, schedule={"interval": 1}, compression=CODECS[codec],
        delay={"outer_steps": outer_steps}, outer_optimizer={"lr": 0.1},
    )  # fmt: skip
    run = Simulated(Net(), sgd, method, 2)
    for _ in range(4):
        run.train_step(loss)
    require_predicted(run)


@pytest.mark.parametrize("name", ["eager", "co2", "dilocox"])
def test_buffers_in_bf16_are_predicted_with_the_tiles_that_they_are_stepped_in(name: str) -> None:
    more: dict[str, Any] = SETTINGS.get(name, {"schedule": {"interval": 2}})
    own: dict[str, Any] = {"state_dtype": "bf16"}
    if name == "co2":  # whole vectors
        own |= {"clip": 3.0, "clip_unit": "rms"}
    run = Simulated(Net(), sgd, preset(name, 2, **{**more, "outer_optimizer": own}), 2)
    for _ in range(9):
        run.train_step(loss)
    require_predicted(run)
    given, numel = run.loops[0].state.allocator.given, 5 * WIDTH * (WIDTH + 1)
    assert given["outer_optimizer"] == 2 * numel


@pytest.mark.parametrize("name", ["co2", "streaming_diloco"])
def test_norms_of_tensors_take_a_vector(name: str) -> None:
    more: dict[str, Any] = SETTINGS.get(name, {"schedule": {"interval": 2}})
    if name == "streaming_diloco":
        more = {**more, "delay": {"type": "compensation", "steps": 2, "mode": "dc_asgd"}}
    run = Simulated(Net(), sgd, preset(name, 2, **more), 2)
    for _ in range(9):
        run.train_step(loss)
    assert run.method.measures_tensors
    require_predicted(run)


@pytest.mark.parametrize("rounds_in_codes", [0, 1])
def test_what_factors_are_made_in_beside_training_is_predicted(
    monkeypatch: pytest.MonkeyPatch, rounds_in_codes: int
) -> None:
    side = on_the_side()
    with_side = partial(OuterLoop, resources=Resources(side=side))
    monkeypatch.setattr(simulated, "OuterLoop", with_side)
    method = preset(
        "diloco", 2, schedule={"interval": 1},
        compression={"type": "low_rank", "rank": 4, "dense_rounds": rounds_in_codes},
    )  # fmt: skip
    run = Simulated(Net(), sgd, method, 2)
    for _ in range(3):
        run.train_step(loss)
    run.finish()
    for loop in run.loops:
        counts = [len(parameters) for parameters in loop.adapter.fragment_parameters]
        wire = [gather.wire for gather in loop.matrix_gathers]
        own = method, loop.adapter.fragments, counts, wire, 2
        memory = predict(*own, factors_are_there=True)
        assert loop.state.allocator.given["factors"] == memory.factors > 0
        assert predict(*own).factors == 0
        for place in ("masters", "host", "disk"):
            more = memory.on_device(place) - predict(*own).on_device(place)
            assert more == memory.factors
            assert memory.on_host(place) == predict(*own).on_host(place)
            assert memory.on_disk(place) == predict(*own).on_disk(place)
