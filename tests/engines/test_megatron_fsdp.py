"""Megatron's two kinds of fully sharded data parallelism, against the same training in plain torch.

Each kind in processes of its own: what torch has cached of a mesh of ranks holds their groups.
"""

from __future__ import annotations

import pytest

from tests.distributed import run_distributed
from tests.engines.megatrons import Kind, needs_megatron
from tests.engines.test_megatron import check, train

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
    Kind(fsdp="torch", tensor=2),
    WHOLE._replace(precision="bf16"),
    Kind(fsdp="optim", is_sharded=True),
]
KINDS = [
    *(pytest.param(kind, marks=pytest.mark.ci) for kind in CI),
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_shards_equal_the_reference(kind: Kind) -> None:
    check(kind, run_distributed(train, 4, kind, timeout_seconds=280, engine="megatron"))
