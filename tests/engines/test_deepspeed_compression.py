"""Coded transfers from the shards of ZeRO stages: two clusters of two ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dsx
from dsx.comm.world import current_world
from dsx.config.schema import preset
from tests.distributed import run_distributed
from tests.engines.engines import weights
from tests.held_memory import held_bytes
from tests.installed import needs
from tests.simulated import Simulated

pytestmark = needs("deepspeed")

WIDTH = 48
NUM_STEPS = 13
LOW_RANK = {"type": "low_rank", "rank": 6, "wire": "fp32", "mean_wire": "fp32", "min_saving": 1.0}
COMPRESSIONS: dict[str, dict[str, Any]] = {
    "factors in fp32": {**LOW_RANK, "factor_wire": "fp32", "small_wire": "fp32"},
    "factors in int8, feedback": {**LOW_RANK, "factor_wire": "int8", "error_feedback": "fp32"},
    "top-k": {"type": "top_k", "k": 8, "chunk": 256},
    "int4, feedback": {"type": "quantized", "wire": "int4", "error_feedback": "bf16"},
}


class Net(nn.Module):
    """Matrices of uneven sizes, so that ZeRO cuts them at ragged places."""

    def __init__(self) -> None:
        super().__init__()
        sides = [WIDTH, 64, 36, 33, WIDTH]
        generator = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sides, sides[1:], strict=False))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x - 0.5).square().mean()


def loss_of_part(model: nn.Module, cluster: int, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * cluster + 10 * step + rank)
    return model(torch.randn(4, WIDTH, generator=generator))


RUNS = {
    **{name: ("diloco_delayed", {"compression": codec}) for name, codec in COMPRESSIONS.items()},
    "penalty, layers": (
        "co2",
        {
            "compression": COMPRESSIONS["factors in fp32"],
            "fragments": {"by": "layer", "num_fragments": 4},
        },
    ),
    "a NaN in one shard": ("diloco", {"compression": COMPRESSIONS["factors in int8, feedback"]}),
    **{
        f"{name}, ZeRO-{stage}": ("diloco_delayed", {"compression": COMPRESSIONS[name]})
        for stage, name in (
            (0, "factors in fp32"),
            (0, "int4, feedback"),
            (3, "factors in fp32"),
            (3, "top-k"),
        )
    },
}


def stage_of(name: str) -> int:
    return int(name[-1]) if "ZeRO" in name else 1


def overrides(name: str) -> dict[str, Any]:
    return {"schedule": {"interval": 4}, **RUNS[name][1]}


def lose_one_value(loop: Any) -> None:
    """Let rank 0 of cluster 1 read a NaN at the second launch, in what rank 1 sends for it."""
    if torch.distributed.get_rank() != 0 or loop.transport.seat.cluster_id != 1:
        return
    read, lost = loop.adapter.read, 64 * WIDTH  # in layers.1.weight, of which rank 1 has more

    def read_nan(fragment: int, out: torch.Tensor, start: int = 0) -> None:
        read(fragment, out, start)
        is_there = start <= lost < start + len(out)
        if is_there and loop.history.step == 8 and loop.history.launched[0] == 4:
            out[lost - start] = float("nan")

    loop.adapter.read = read_nan
    loop.adapter.in_a_row = lambda *of: None  # so that all parts are read


def train_all() -> dict[str, Any]:
    import logging

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, (method, _) in RUNS.items():
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage_of(name)},
            "steps_per_print": 10**9,
            "dsx": {
                "preset": method,
                "clusters": {"num_clusters": 2, "deadline_seconds": 30},
                **overrides(name),
            },
        }
        if current_world() is None:
            dsx.init_distributed(config)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        engine = dsx.initialize(model=model, optimizer=optimizer, config=config)[0]
        if "NaN" in name:
            lose_one_value(engine.dsx.loop)
        for step in range(1, NUM_STEPS + 1):
            loss = loss_of_part(engine, engine.dsx.cluster_id, step, engine.global_rank)
            engine.backward(loss)
            engine.step()
        engine.dsx.finish()
        loop = engine.dsx.loop
        results[name] = {
            "anchors": [a.clone().numpy() for a in loop.state.anchor],
            "weights": [w.numpy() for w in weights(engine).values()],
            "split": sum(not s.is_whole for f in loop.adapter.fragments for s in f.layout),
            "moved": loop.matrix_gathers[0].is_needed,
            "bytes": loop.totals.bytes_sent,
            "refused": loop.totals.refused,
            "memory": (engine.dsx.memory, held_bytes(loop.state)),
            "given": loop.state.allocator.given,
            "state": [t.clone().numpy() for t in loop.state.named_state(0).values()],
            "sent": [f.numel for f in (route.wire for route in loop.matrix_gathers)],
            "held": [f.numel for f in loop.adapter.fragments],
        }
        engine.dsx.close()
    return results


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_distributed(train_all, 4, timeout_seconds=200)


@pytest.mark.parametrize("name", RUNS)
def test_all_clusters_apply_the_same_bits(name: str, trained: list[dict[str, Any]]) -> None:
    for rank in (0, 1):
        first, second = trained[rank][name], trained[rank + 2][name]
        assert all((a == b).all() for a, b in zip(first["anchors"], second["anchors"], strict=True))
    assert all(result[name]["split"] for result in trained)  # otherwise it proves nothing
    is_low_rank = "low_rank" in str(RUNS[name])
    if name != "penalty, layers":
        assert {result[name]["moved"] for result in trained} == {is_low_rank}


@pytest.mark.parametrize("name", RUNS)
def test_memory_is_predicted(name: str, trained: list[dict[str, Any]]) -> None:
    for result in trained:
        (memory, held), given = result[name]["memory"], result[name]["given"]
        apart = memory.work_space + memory.in_the_cluster + memory.channels
        assert memory.total - apart == held
        assert sum(given.values()) == pytest.approx(memory.total, rel=0.05)
        assert memory.codec > 0
        assert memory.in_the_cluster > 0 or "low_rank" not in str(RUNS[name])


def test_a_nan_in_one_shard_is_refused_by_all_ranks(trained: list[dict[str, Any]]) -> None:
    """Its matrix may be another rank's to send; codecs keep their state on every rank."""
    results = [result["a NaN in one shard"] for result in trained]
    assert [result["refused"] for result in results] == [1] * 4
    for result in results:
        assert all(np.isfinite(x).all() for x in (*result["weights"], *result["state"]))


def test_some_rank_holds_a_shard_of_a_fragment_and_sends_nothing_of_it(
    trained: list[dict[str, Any]],
) -> None:
    """The run below must agree in that case too: its sideband still has to travel."""
    pairs = [
        pair
        for result in trained
        for pair in zip(
            result["penalty, layers"]["held"], result["penalty, layers"]["sent"], strict=True
        )
    ]
    assert any(held and not sent for held, sent in pairs)


@pytest.mark.parametrize(
    "name",
    ["factors in fp32", "penalty, layers", "factors in fp32, ZeRO-0", "factors in fp32, ZeRO-3"],
)
def test_shards_give_the_factors_of_the_whole_matrices(
    name: str, trained: list[dict[str, Any]]
) -> None:
    """The same run with every matrix whole, in one process; and far fewer bytes than fp32."""
    run = Simulated(
        Net(),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.2),
        preset(RUNS[name][0], **overrides(name)),
        2,
    )
    start = [p.detach().clone() for p in run.models[0].parameters()]
    for _ in range(NUM_STEPS):
        run.train_step(lambda m, c, t: sum(loss_of_part(m, c, t, r) for r in range(2)) / 2)
    run.finish()
    for rank, result in enumerate(trained):
        expected = [p.detach().numpy() for p in run.models[rank // 2].parameters()]
        for ours, theirs, before in zip(result[name]["weights"], expected, start, strict=True):
            moved = np.abs(theirs - before.numpy()).max()
            assert np.abs(ours - theirs).max() < 1e-3 * moved
    numel = sum(p.numel() for p in run.models[0].parameters())
    sent = sum(result[name]["bytes"] for result in trained[:2])
    assert sent < 0.6 * 3 * 4 * numel  # three rounds; fp32 sends 4 bytes per element with C = 2
