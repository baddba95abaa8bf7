"""Masters inside Transformer Engine's FusedAdam, of which a double is here."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_distributed
from tests.engines.megatron_precision import PreciseFusedAdam, joined
from tests.engines.megatrons import Kind, build_engine, needs_megatron
from tests.engines.test_megatron import check, train
from tests.engines.test_megatron_checkpoint import END, STOP, are_equal, state_of
from tests.engines.test_megatron_checkpoint import train as train_on

pytestmark = needs_megatron
SHARDED = Kind(precision="bf16", is_sharded=True)
REMAINDERS = SHARDED._replace(fused="remainders")


def train_all(base: str, kinds: list[Kind]) -> list[Any]:
    trained = [train(kind) for kind in kinds]
    return [*trained, [resume(kind, Path(base)) for kind in kinds[1:]]]


def resume(kind: Kind, base: Path) -> bool:
    """Whether a run that goes on from its outer state and inner state comes to the same bits.

    Not by Megatron's files: core 0.16.1 asks FusedAdam for a state named "padding", which it lacks.
    """
    from dsx.engines.megatron.checkpoint import load_outer_state, save_outer_state

    engine = build_engine(kind)
    train_on(engine, 1, STOP)
    assert engine.handle.loop.in_flight and save_outer_state(engine.handle, STOP, base / str(kind))
    inner = engine.optimizer.chained_optimizers[0].optimizer
    weights = [p.detach().clone() for p in engine.chunks[0].parameters()]
    state = copy.deepcopy(inner.state_dict())
    train_on(engine, STOP + 1, END)
    expected = state_of(engine)
    engine.handle.close()
    other = build_engine(kind, seed=5)
    for parameter, weight in zip(other.chunks[0].parameters(), weights, strict=True):
        parameter.data.copy_(weight)
    held = other.optimizer.chained_optimizers[0].optimizer
    held.load_state_dict(state)
    load_outer_state(other.handle, STOP, base / str(kind))
    train_on(other, STOP + 1, END)
    is_equal = are_equal(state_of(other), expected)
    other.handle.close()
    return is_equal


@pytest.mark.ci
@pytest.mark.timeout(600)
def test_masters_in_the_optimizer_equal_the_reference_and_megatron_s_own(tmp_path: Path) -> None:
    """To the bit where both are fp32; remainders round ties of a weight otherwise."""
    kinds = [SHARDED._replace(fused="plain"), SHARDED._replace(fused="masters"), REMAINDERS]
    ranks = run_distributed(
        train_all, 4, str(tmp_path), kinds, timeout_seconds=580, engine="megatron"
    )
    for index, kind in enumerate(kinds):
        check(kind, [rank[index] for rank in ranks])
    for plain, inside, _, resumed in ranks:
        assert resumed == [True, True]
        assert plain["losses"] == inside["losses"]
        for ours, theirs in zip(inside["anchors"], plain["anchors"], strict=True):
            assert (ours == theirs).all()


def test_remainders_are_read_and_written_as_the_kernel_does() -> None:
    from dsx.engines.megatron.precision_aware import piece_of

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1000, generator=generator) * 10.0 ** torch.arange(-20, 20).repeat(25)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F7F8000, 0x00008000], dtype=torch.int32)
    values[:4], values[4:8] = ties.view(torch.float32), -ties.view(torch.float32)
    weights = torch.zeros(1000, dtype=torch.bfloat16)
    optimizer = PreciseFusedAdam([weights], master_weights=True, store_param_remainders=True)
    whole = piece_of(optimizer, weights, (1000,), 0)
    assert whole.view().equal(torch.zeros(1000))  # of what the first step begins with
    whole.overwrite(values)
    assert whole.view().equal(values)
    state = optimizer.state[weights]["master_param"]
    assert joined(weights, state).equal(values) and state.dtype == torch.int16
    nearest = values.to(torch.bfloat16)
    assert (weights == nearest).float().mean() > 0.99  # ties go up
    part = whole.cut(10, 20)
    assert part is not None
    part.overwrite(torch.ones(10))
    expected = values.clone()
    expected[10:20] = 1.0
    assert joined(weights, state).equal(expected) and part.view().equal(torch.ones(10))
    optimizer.state[weights]["master_param"] = torch.zeros(1000, dtype=torch.int16)  # loaded
    assert whole.view().equal(weights.float())
