"""Megatron's two kinds of fully sharded data parallelism, against the same training in plain torch.

Each kind in processes of its own: what torch has cached of a mesh of ranks holds their groups.
"""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.engines.megatrons import Kind, needs_megatron
from tests.engines.test_megatron import check, train

pytestmark = needs_megatron
CI = pytest.mark.ci
KINDS = [
    (Kind(fsdp="torch"), 4),
    pytest.param(Kind(fsdp="torch", precision="bf16"), 4, marks=CI),
    pytest.param(Kind(fsdp="torch", experts=4, is_biased=True), 4, marks=CI),
    pytest.param(Kind(fsdp="torch", tensor=2, precision="bf16"), 8, marks=CI),
    (Kind(fsdp="optim_grads_params", is_sharded=True), 4),
    pytest.param(Kind(fsdp="optim_grads_params", is_sharded=True, precision="bf16"), 4, marks=CI),
    pytest.param(Kind(fsdp="optim_grads", is_sharded=True, precision="bf16"), 4, marks=CI),
    pytest.param(Kind(fsdp="optim", is_sharded=True), 4, marks=CI),
]


@pytest.mark.parametrize(("kind", "num_ranks"), KINDS, ids=str)
def test_shards_equal_the_reference(kind: Kind, num_ranks: int) -> None:
    check(kind, run_distributed(train, num_ranks, kind, timeout_seconds=280, engine="megatron"))
