"""Coded methods end to end: real processes give the in-process bits, and a resumed run its own."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dsx
from dsx.checkpoint.outer_state import load_state
from dsx.comm.topology import RankInfo
from dsx.config.schema import preset, resolve_method
from tests.checkpoint.saved import save_state
from tests.distributed import run_distributed
from tests.levels import by_default
from tests.simulated import Simulated

WIDTH, NUM_STEPS = 48, 12
CODECS: dict[str, dict[str, Any]] = {
    "quantized": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
    "low_rank": {
        "type": "low_rank",
        "rank": 6,
        "factor_wire": "int8",
        "error_feedback": "fp32",
        "dense_rounds": 1,
    },
    "top_k": {"type": "top_k", "k": 32, "chunk": 1024},
    "random_top_k": {"type": "random_top_k", "random_ratio": 0.4, "top_k_ratio": 0.2, "chunk": 256},
}
KEPT_LOCALLY = "random_top_k, kept locally"
CODECS_OF_ALL = CODECS | {KEPT_LOCALLY: CODECS["random_top_k"] | {"error_feedback": "none"}}
CODECS_OF_ALL |= {"two legs": {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"}}
STREAMING = {"fragments": {"num_fragments": 2}, "delay": {"steps": 2, "alpha": 0.3}}
CONTROL = {"rank": 6, "max_rank": 12, "min_interval": 2, "window": 1}
CONTROL |= {"step_seconds": 1.0, "round_seconds": 2.0}  # so that H stays
METHODS: dict[str, dict[str, Any]] = {
    "diloco": {"schedule": {"interval": 3}},
    "diloco_delayed": {"schedule": {"interval": 3}},
    "streaming_diloco": {"schedule": {"interval": 4}, **STREAMING},
    "eager": {"schedule": {"interval": 3}, "outer_optimizer": {"lr": 0.3}},
    "eager, two": {
        "schedule": {"interval": 2},
        "delay": {"outer_steps": 2},
        "outer_optimizer": {"lr": 0.1},
    },
    "dilocox": {"schedule": {"interval": 2}, "fragments": {"num_fragments": 2}, "control": CONTROL},
    "cocktail_sgd": {},
    "streaming_diloco, shift": {
        "schedule": {"interval": 4},
        "fragments": {"num_fragments": 2},
        "delay": {"type": "shift", "steps": 2},
    },
    "overlap_local_sgd": {"schedule": {"interval": 2}},
}
DELAYED = [("diloco_delayed", codec) for codec in CODECS]
EAGER = [("eager", "quantized"), ("eager", "top_k"), ("eager, two", "quantized")]
TWO_LEGS = [("streaming_diloco, shift", "two legs")]
BASELINES = [("cocktail_sgd", KEPT_LOCALLY), ("overlap_local_sgd", "quantized")]
RUNS = {
    2: [*DELAYED, *EAGER, *BASELINES],
    4: [*DELAYED, *EAGER, *BASELINES, *TWO_LEGS, *(("diloco", codec) for codec in CODECS)],
}
RESUMED = [
    *(
        (method, codec)
        for method in ("diloco_delayed", "streaming_diloco", "dilocox")
        for codec in CODECS
    ),
    *EAGER,
    *BASELINES,
]


class WideNet(nn.Module):
    """Matrices of 2304 elements, above what counts as small, and biases, below."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def loss(model: nn.Module, cluster: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * cluster + step)
    x = torch.randn(8, WIDTH, generator=generator)
    return (model(x) - torch.tanh(x.roll(1, dims=1))).square().mean()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def preset_of(method: str) -> str:
    return method.split(",")[0]


def overrides(method: str, codec: str) -> dict[str, Any]:
    return {**METHODS[method], "compression": CODECS_OF_ALL[codec]}


def simulated(method: str, codec: str, num_clusters: int) -> Simulated:
    own = preset(preset_of(method), num_clusters, **overrides(method, codec))
    return Simulated(WideNet(), adamw, own, num_clusters)


def config(method: str, codec: str, num_clusters: int) -> dict[str, Any]:
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 20, "on_mismatch": "stop"}
    return {"dsx": {"preset": preset_of(method), "clusters": clusters, **overrides(method, codec)}}


def train_over_gloo(num_clusters: int) -> dict[tuple[str, str], Any]:
    world = dsx.init_distributed(config(*DELAYED[0], num_clusters))
    results: dict[tuple[str, str], Any] = {}
    for run in RUNS[num_clusters]:
        model = WideNet(seed=world.cluster_id)  # only cluster 0's start counts
        optimizer = adamw(model)
        handle = dsx.attach(model, optimizer, config=config(*run, num_clusters))
        for step in range(1, NUM_STEPS + 1):
            optimizer.zero_grad()
            loss(model, world.cluster_id, step).backward()
            optimizer.step()
        handle.finish()
        state = handle.loop.state.named_state(0)
        results[run] = {
            "parameters": {n: p.detach().clone().numpy() for n, p in model.named_parameters()},
            "state": {n: t.clone().numpy() for n, t in state.items()},
            "bytes_sent": handle.totals.bytes_sent,
        }
        handle.close()
    return results


@pytest.mark.parametrize("num_clusters", by_default(RUNS, 2))
def test_real_processes_give_the_bits_of_the_in_process_run(num_clusters: int) -> None:
    """Two gather codes, four have owners; with three matrices the last of four averages no P."""
    results = run_distributed(train_over_gloo, num_clusters, num_clusters, timeout_seconds=120)
    for method, codec in RUNS[num_clusters]:
        run = simulated(method, codec, num_clusters)
        for _ in range(NUM_STEPS):
            run.train_step(loss)
        run.finish()
        for cluster, parameters in enumerate(run.parameters()):
            got = results[cluster][method, codec]
            for name, value in parameters.items():
                assert torch.equal(torch.from_numpy(got["parameters"][name]), value)
            state = run.loops[cluster].state.named_state(0)
            assert got["state"].keys() == state.keys()
            assert any("residual" in name or "under_way" in name for name in state)
            assert any("anchor" in name for name in state)
            for name, value in state.items():
                assert torch.equal(torch.from_numpy(got["state"][name]), value), name
            assert got["bytes_sent"] == run.loops[cluster].totals.bytes_sent


def train_on_another_cpu() -> tuple[str, dict[tuple[str, str], Any]]:
    """Cluster 1 as if its processor had no vector units, and with two threads."""
    if os.environ["RANK"] == "1":
        os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE")
        torch.set_num_threads(2)
    return torch.backends.cpu.get_cpu_capability(), train_over_gloo(2)


@pytest.mark.ci
def test_other_processors_decode_the_same_bits() -> None:
    """Their encoders may differ, what they apply may not."""
    (one, ours), (other, theirs) = run_distributed(train_on_another_cpu, 2, engine=None)
    if one == other:
        pytest.skip(f"this processor has no more than {one}")
    assert other == "DEFAULT"
    for run in DELAYED:
        state, same = (results[run]["state"] for results in (ours, theirs))
        names = [n for n in state if "residual" not in n]
        assert "anchor" in names
        assert ("codec.q.layers.0.weight" in names) == (run[1] == "low_rank")
        assert all((state[name] == same[name]).all() for name in names)


@pytest.mark.parametrize("codec", CODECS)
def test_codes_save_bytes_and_training_still_works(codec: str) -> None:
    """And the anchors are the same to the bit on all clusters, five of them."""
    first = sum(loss(WideNet(), m, 1).item() for m in range(5)) / 5
    run = simulated("diloco", codec, 5)
    last: list[float] = []
    for _ in range(NUM_STEPS):
        last = run.train_step(loss)
    run.finish()
    assert sum(last) / 5 < 0.8 * first
    for loop in run.loops[1:]:
        assert torch.equal(loop.state.anchor[0], run.loops[0].state.anchor[0])
    dense = Simulated(WideNet(), adamw, preset("diloco", 5, **METHODS["diloco"]), 5)
    for _ in range(NUM_STEPS):
        dense.train_step(loss)
    assert max(run.bytes_sent) < 0.35 * min(dense.bytes_sent)


@pytest.mark.parametrize("stop", by_default([1, 2, 3, 4, 6], 3))
@pytest.mark.parametrize(("method", "codec"), RESUMED)
def test_resume_is_bit_for_bit(method: str, codec: str, stop: int, tmp_path: Path) -> None:
    """At every offset of a period, with transfers in flight at some of them."""
    axes = resolve_method(preset_of(method), overrides(method, codec))[1]
    whole, first, second = (simulated(method, codec, 2) for _ in range(3))
    for _ in range(NUM_STEPS):
        whole.train_step(loss)
    for _ in range(stop):
        first.train_step(loss)
    for rank, loop in enumerate(first.loops):
        save_state(loop, tmp_path / str(rank), RankInfo(rank, 2, 0, 1), "run-a", axes, {})
    for rank, loop in enumerate(second.loops):
        second.models[rank].load_state_dict(first.models[rank].state_dict())
        inner = copy.deepcopy(first.optimizers[rank].state_dict())
        second.optimizers[rank].load_state_dict(inner)
        load_state(loop, tmp_path / str(rank), RankInfo(rank, 2, 0, 1), axes)
        assert len(loop.in_flight) == len(first.loops[rank].in_flight)
        assert len(loop.in_flight) > 0 or method != "diloco_delayed" or stop < 3
    for _ in range(NUM_STEPS - stop):
        second.train_step(loss)
    for ours, theirs in zip(second.parameters(), whole.parameters(), strict=True):
        assert all(torch.equal(ours[n], theirs[n]) for n in theirs)
    for ours, theirs in zip(second.loops, whole.loops, strict=True):
        assert ours.totals.bytes_sent == theirs.totals.bytes_sent
        assert ours.history == theirs.history
        assert method != "dilocox" or ours.history.decisions["rank"] > 6  # it was moved
        for fragment in range(ours.history.num_fragments):
            state, expected = (x.state.named_state(fragment) for x in (ours, theirs))
            assert state.keys() == expected.keys()
            assert any("residual" in name or "under_way" in name for name in state)
            assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_a_run_without_the_residual_would_go_another_way() -> None:
    """So that the test above proves something: state that is lost is seen."""
    whole, other = (simulated("diloco", "quantized", 2) for _ in range(2))
    for step in range(6):
        whole.train_step(loss)
        other.train_step(loss)
        if step == 3:
            for loop in other.loops:
                for name, tensor in loop.state.named_state(0).items():
                    if "residual" in name:
                        assert tensor.any()
                        tensor.zero_()
    ours, theirs = other.parameters()[0], whole.parameters()[0]
    assert any(not torch.equal(ours[name], theirs[name]) for name in theirs)
