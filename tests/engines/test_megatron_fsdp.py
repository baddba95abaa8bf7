"""Megatron's two kinds of fully sharded data parallelism, against the same training in plain torch.

Each kind in processes of its own: what torch has cached of a mesh of ranks holds their groups.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import dsx
from tests.distributed import run_distributed
from tests.engines.engines import NUM_CLUSTERS
from tests.engines.megatrons import (
    Kind,
    build_engine,
    build_inner,
    dsx_config,
    needs_megatron,
    whole_weights,
)
from tests.engines.test_megatron import as_arrays, check, train
from tests.engines.test_megatron_alone import ALONE, state_of
from tests.engines.test_megatron_alone import train as train_alone

pytestmark = needs_megatron
WHOLE = Kind(fsdp="optim_grads_params", is_sharded=True)
CI = [
    Kind(fsdp="torch"),
    Kind(fsdp="torch", experts=4, is_biased=True),
    WHOLE._replace(is_tied=True, overlaps=True),
    Kind(fsdp="optim_grads", is_sharded=True, precision="bf16"),
]
SLOW = [
    Kind(fsdp="torch", precision="bf16"),
    WHOLE._replace(precision="bf16"),
    Kind(fsdp="optim", is_sharded=True),
    WHOLE._replace(context=2),
    Kind(fsdp="optim", is_sharded=True, tensor=2, experts=4),
    Kind(fsdp="optim", is_sharded=True, experts=4, expert_parallel=2, is_biased=True),
]
EXPERTS = WHOLE._replace(experts=4, expert_parallel=2)
BOTH = EXPERTS._replace(tensor=2, expert_tensor=1)
OF_FOUR = [  # every group of data- and expert-data-parallel ranks has two
    WHOLE._replace(tensor=2),
    WHOLE._replace(tensor=2, is_tied=True, precision="bf16"),
    EXPERTS._replace(fsdp="optim_grads"),
    EXPERTS._replace(is_biased=True),
    Kind(fsdp="torch", tensor=2),
    Kind(fsdp="torch", tensor=2, precision="bf16"),
]
BY_ROUNDING = [  # whose tokens may go to other experts than in fp32
    EXPERTS._replace(fsdp="optim_grads", precision="bf16"),
    BOTH._replace(precision="bf16"),
]
KINDS = [
    *(pytest.param(kind, 2, marks=pytest.mark.ci, id=str(kind)) for kind in CI),
    *(pytest.param(kind, 2, marks=pytest.mark.slow, id=str(kind)) for kind in SLOW),
    pytest.param(BOTH, 4, marks=pytest.mark.ci, id=str(BOTH)),
    *(pytest.param(kind, 4, marks=pytest.mark.slow, id=str(kind)) for kind in OF_FOUR),
]


@pytest.mark.parametrize(("kind", "num_ranks"), KINDS)
def test_shards_equal_the_reference(kind: Kind, num_ranks: int) -> None:
    ranks = NUM_CLUSTERS * num_ranks
    check(kind, run_distributed(train, ranks, kind, timeout_seconds=280, engine="megatron"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*OF_FOUR, BOTH, *BY_ROUNDING], ids=str)
def test_one_cluster_equals_plain_megatron(kind: Kind) -> None:
    """Without dsx and with it, each in processes of its own: bit for bit."""
    plain, ours = (
        run_distributed(alone, 4, kind, is_attached, timeout_seconds=280, engine="megatron")
        for is_attached in (False, True)
    )
    for one, other in zip(plain, ours, strict=True):
        assert one["losses"] == other["losses"]
        assert one["state"].keys() == other["state"].keys()
        differ = [n for n, value in one["state"].items() if (other["state"][n] != value).any()]
        assert not differ and other["syncs"] == 2
        assert all((one["state"][n] != weight).any() for n, weight in one["begin"].items())


def alone(kind: Kind, is_attached: bool) -> dict[str, Any]:
    from dsx.bench.megatron_on_cpu import install

    install()
    dsx.init_distributed(dsx_config(**ALONE))
    make = partial(build_engine, **ALONE) if is_attached else build_inner
    engine = make(kind, seed=0)
    begin, losses = whole_weights(engine), train_alone(engine)
    syncs = engine.handle.totals.syncs if is_attached else 0
    return {
        "losses": losses,
        "begin": as_arrays(begin),
        "state": as_arrays(state_of(engine)),
        "syncs": syncs,
    }


@pytest.mark.ci
def test_gradients_of_a_rank_alone_are_not_sharded() -> None:
    """Megatron-core 0.16 gives it gradients of no batch; it trains where they are whole."""
    for said in run_distributed(say, 2, timeout_seconds=100, engine="megatron"):
        told = "of Megatron: megatron-core before 0.17 sums its gradients once more at every micro-"
        for kind, name in {"data": "optim_grads_params", "expert-data": "optim_grads"}.items():
            setting = f"data_parallel_sharding_strategy={name!r} over a {kind}-parallel rank alone"
            assert said[kind].startswith(f"dsx does not serve {setting} {told}")
        assert said["whole"] == "served"


def say() -> dict[str, str]:
    from dsx.bench.megatron_on_cpu import install

    install()
    dsx.init_distributed(dsx_config(**ALONE))
    kinds = {
        "data": WHOLE._replace(tensor=2),
        "expert-data": EXPERTS._replace(fsdp="optim_grads"),
        "whole": Kind(fsdp="optim", is_sharded=True, tensor=2),
    }
    said: dict[str, str] = {}
    for name, kind in kinds.items():
        try:
            build_engine(kind, seed=0, **ALONE).handle.close()
            said[name] = "served"
        except ValueError as error:
            said[name] = str(error)
    return said
