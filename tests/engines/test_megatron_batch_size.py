"""A batch that grows is counted by what the cluster itself has read, by Megatron's calculator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.distributed import run_distributed
from tests.engines.megatrons import Kind, build_inner, needs_megatron

pytestmark = needs_megatron
RAMP = [4, 4, 24]  # from 4 samples by 4, over 24 samples
FULL, MICRO = 16, 2


def growing(counts: list[int]) -> Iterator[tuple[int, int]]:
    """Micro-batches of a step behind so many samples, and how many samples it is short of."""
    from megatron.core import num_microbatches_calculator as calculator

    from megatron_patches.batch_size import count_by_own, left_out

    for count in counts:
        count_by_own(SimpleNamespace(consumed_train_samples=count))
        yield calculator.get_num_microbatches(), left_out()


def read_batches() -> dict[str, Any]:
    from megatron.core import num_microbatches_calculator as calculator

    from megatron_patches.batch_size import facts_of_batch

    build_inner(Kind(), 0)
    found: dict[str, Any] = {}
    calculator.init_num_microbatches_calculator(0, RAMP, FULL, MICRO, 1)
    calculator.update_num_microbatches(40)  # the place of two clusters, as a checkpoint says it
    found["behind"] = list(growing([20, 0, 8, 24, 25]))
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, [5, 4, 24], 17, MICRO, 1, True)
    found["rounded"] = list(growing([0, 8]))
    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, FULL, MICRO, 1)
    found["constant"] = list(growing([0, 99]))
    calculator.unset_num_microbatches_calculator()
    arguments = SimpleNamespace(rampup_batch_size=RAMP, micro_batch_size=MICRO)
    found["facts"] = facts_of_batch(arguments)
    arguments.decrease_batch_size_if_needed = True
    found["facts of rounded"] = facts_of_batch(arguments)
    found["no facts"] = facts_of_batch(SimpleNamespace(rampup_batch_size=None))
    return found


def test_batches_grow_by_a_clusters_own_count() -> None:
    found, _ = run_distributed(read_batches, 2, timeout_seconds=200, engine="megatron")
    assert found["behind"] == [(6, 0), (2, 0), (4, 0), (8, 0), (8, 0)]
    assert found["rounded"] == [(2, 1), (4, 1)]  # of 5 and 9 samples
    assert found["constant"] == [(8, 0), (8, 0)]
    ramp = {"rampup_batch_size": RAMP, "step_batch_size_schedule": None}
    assert found["facts"] == {**ramp, "rounded_to": None}
    assert found["facts of rounded"] == {**ramp, "rounded_to": MICRO}
    assert found["no facts"] == {}


@pytest.mark.parametrize("name", ["rampup_batch_size", "step_batch_size_schedule"])
def test_a_fixed_number_of_backwards_is_refused(name: str) -> None:
    from megatron_patches.batch_size import refuse_fixed_backwards

    arguments = SimpleNamespace(**{name: RAMP})
    refuse_fixed_backwards(arguments, 1)
    refuse_fixed_backwards(SimpleNamespace(), 4)
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ValueError, match=f"schedule.backwards=4 with {flag}, "):
        refuse_fixed_backwards(arguments, 4)
