"""What lets Megatron save and load fully sharded optimizers; whole runs in tests/launch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsx.engines.megatron.fully_sharded import keep_state_of_all
from megatron_patches import fully_sharded
from tests.distributed import run_distributed

ROWS, STEPS = 4, 3


def gradient(step: int) -> torch.Tensor:
    return torch.full((ROWS, 2), float(step - 1))


def train(rank: int, is_kept: bool) -> tuple[dict[str, Any], int]:
    """Step a parameter that lies on rank 0 alone; return what is kept of it, and its rows here."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))

    def sharded(whole: torch.Tensor) -> Any:
        local = whole[: 0 if rank else None]
        layout = {"shape": whole.shape, "stride": whole.stride()}
        return DTensor.from_local(local.clone(), mesh, [Shard(0)], run_check=False, **layout)

    parameter: Any = nn.Parameter(sharded(torch.ones(ROWS, 2)))
    parameter.orig_param = None  # by which Megatron-FSDP's are known
    if is_kept:
        keep_state_of_all()
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    for step in range(STEPS):
        parameter.grad = None if rank else sharded(gradient(step))  # as update_main_grads does
        optimizer.step()
    state = optimizer.state.get(parameter, {})
    kept = {name: getattr(value, "_local_tensor", value).clone() for name, value in state.items()}
    return {**kept, "weight": parameter.detach().to_local().clone()}, len(kept)


def of_rank(is_kept: bool) -> tuple[dict[str, Any], int]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return train(dist.get_rank(), is_kept)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_rank_has_state_of_what_it_holds_nothing_of(is_kept: bool) -> None:
    """As many states and steps as the others, which train as without; none by torch itself."""
    (first, num_first), (second, num_second) = run_distributed(of_rank, 2, is_kept)
    assert num_first == 3 and num_second == 3 * is_kept
    if is_kept:
        assert first["step"] == second["step"] == STEPS
        assert all(second[name].shape == (0, 2) for name in ("exp_avg", "exp_avg_sq", "weight"))
    plain = nn.Parameter(torch.ones(ROWS, 2))
    optimizer = torch.optim.AdamW([plain], lr=0.1)
    for step in range(STEPS):
        plain.grad = gradient(step)
        optimizer.step()
    assert first["weight"].equal(plain) and first["exp_avg"].equal(
        optimizer.state[plain]["exp_avg"]
    )


class Chain:
    """Megatron's chain of optimizers, as core_v0.16.1 to main of August 2026 have it."""

    def __init__(self, *chained: Any) -> None:
        self.chained_optimizers = list(chained)

    def state_dict(self) -> Any:
        states = [optimizer.state_dict() for optimizer in self.chained_optimizers]
        return states if len(states) > 1 else states[0]


def test_fsdp2_s_chain_of_one_makes_the_state_that_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = "megatron.core.optimizer.optimizer"
    names = [own.rsplit(".", parts)[0] for parts in range(4)]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    chain = type("ChainedOptimizer", (Chain,), {"state_dict": Chain.state_dict})
    sys.modules[own].ChainedOptimizer = chain  # type: ignore[attr-defined]
    weight = nn.Parameter(torch.ones(2))
    adam = torch.optim.AdamW([weight])

    def make_state(optimizer: Any, config: str) -> None:
        optimizer.state[weight] = {"exp_avg": torch.zeros(2)}  # no step, as Megatron makes it

    inner = SimpleNamespace(
        optimizer=adam, config="", init_state_fn=make_state, state_dict=adam.state_dict
    )
    with pytest.raises(TypeError, match="is_loading"):
        chain(inner).state_dict(is_loading=True)
    fully_sharded._hand_on_that_it_loads.cache_clear()
    fully_sharded.mend_checkpoints(SimpleNamespace(use_torch_fsdp2=False))
    with pytest.raises(TypeError, match="is_loading"):
        chain(inner).state_dict(is_loading=True)
    fully_sharded.mend_checkpoints(SimpleNamespace(use_torch_fsdp2=True))
    assert chain(inner).state_dict()["state"] == {}
    made = chain(inner).state_dict(is_loading=True)
    assert {*made["state"][0]} == {"exp_avg", "step"}
    adam.load_state_dict(made)
    assert len(chain(inner, inner).state_dict()) == 2
    with pytest.raises(TypeError, match="is_loading"):  # of which Megatron has no form
        chain(inner, inner).state_dict(is_loading=True)
