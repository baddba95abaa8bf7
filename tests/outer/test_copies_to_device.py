"""What an outer step copies from the host to an accelerator, the training thread does not wait for.

On the CPU: a copy there says whether it would have waited.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dsx.method.fragments import lay_out
from dsx.outer.matrix_owners import WholeMatrices
from dsx.outer.whole_matrices import plan_gathers
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, H, TinyNet, mean_loss

WHOLES = {"a": (6, 4), "b": (5,), "c": (4, 6)}


class Copies(TorchDispatchMode):
    """Notes of each copy that `counts` takes, of source and target, whether it waits."""

    def __init__(self, counts: Callable[[Tensor, Tensor], bool]) -> None:
        super().__init__()
        self._counts = counts
        self.waits: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default and self._counts(args[1], args[0]):
            is_without = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            self.waits.append(not is_without)
        return func(*args, **kwargs)


def test_matrices_are_taken_apart_without_waiting() -> None:
    """Of two ranks: one's matrix is put together on the other, and comes back from the host."""
    halves = [{"a": ((12,), 12 * r), "b": ((5,), 0), "c": ((12,), 12 * r)} for r in range(2)]
    layouts = [lay_out([["a", "c", "b"] if r == 0 else ["a", "c"]],
                       halves[r] if r == 0 else {n: halves[r][n] for n in ("a", "c")}, WHOLES)
               for r in range(2)]  # fmt: skip
    wanted = WholeMatrices(lambda slot: len(slot.whole) == 2, lambda slot: slot.numel)
    (gather,) = plan_gathers(layouts, 0, wanted, torch.device("meta"))
    assert gather.is_needed
    mean = torch.zeros(gather.wire.numel)
    out = torch.empty(layouts[0][0].numel, device="meta")
    with Copies(lambda source, target: source.device != target.device) as copies:
        gather.from_wire(mean, out, lambda sent, received: None)
    assert len(copies.waits) >= 3  # of each matrix that is here, and what was never away
    assert not any(copies.waits)


def test_a_penalty_of_each_element_is_taken_without_waiting() -> None:
    method = ALL_CASES["co2, element, nesterov, clip"].method(2)
    run = Simulated(TinyNet(), lambda m: torch.optim.SGD(m.parameters(), lr=0.1), method, 2)
    for _ in range(2 * H - 1):
        run.train_step(mean_loss)
    there = {loop.state.scratch("local", 1).untyped_storage().data_ptr() for loop in run.loops}
    notes = {
        buffers.sideband.averages.untyped_storage().data_ptr()
        for loop in run.loops for arenas in loop.state._buffers for buffers in arenas.buffers
    }  # fmt: skip

    def is_of_a_note(source: Tensor, target: Tensor) -> bool:
        at, to = (t.untyped_storage().data_ptr() for t in (source, target))
        return at in notes and to in there

    with Copies(is_of_a_note) as copies:
        run.train_step(mean_loss)
    assert len(copies.waits) == 2  # of both clusters
    assert not any(copies.waits)
