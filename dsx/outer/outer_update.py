"""The outer rule's update where its buffers are kept in bf16: a tile at a time, in fp32.

A tile of each buffer is taken to fp32, the rule steps it, and it is rounded back (at random, see
stochastic_rounding.py); what is applied is from before the rounding. Rules are elementwise, so
tiles give the bits of a whole vector; one that measures tensors is given whole vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from dsx.core.buffers import Buffers
from dsx.core.types import Fragment
from dsx.method.outer_optimizer import OuterContext, OuterOptimizer
from dsx.outer.memory import ROUNDED_TOGETHER as TILE
from dsx.outer.stochastic_rounding import StochasticRounding


class OuterUpdate:
    """Calls outer rules with fp32 buffers, however they are kept; `work` lends the space."""

    def __init__(self, fragments: Sequence[Fragment], work: Buffers) -> None:
        self._rounding = StochasticRounding(fragments, work)
        self._work = work.work

    def of(
        self,
        rule: OuterOptimizer,
        gradient: Tensor,
        slots: Mapping[str, Tensor],
        context: OuterContext,
        place: tuple[int, int],
        owner: str,
    ) -> Tensor:
        """Return what is to be subtracted, in `context.out` or in place of `gradient` `[n]`.

        They are the elements from `place` on, a fragment and where in it. Of `slots` those of the
        rule are moved; `owner` tells which of several sets they are.
        """
        if rule.state_dtype == "fp32":
            return rule.update(gradient, slots, context)
        (fragment, begin), numel = place, gradient.numel()
        updates = gradient if context.out is None else context.out
        longest = max(numel, 1) if rule.measures_tensors else TILE
        for start in range(0, max(numel, 1), longest):  # also of none: ranks may measure together
            part = slice(start, min(start + longest, numel))
            values = {
                name: self._work(f"outer {name}", (part.stop - start,)).copy_(slots[name][part])
                for name in rule.slots
            }
            out = None if context.out is None else context.out[part]
            own = replace(context, scratch=context.scratch[part], out=out)
            update = rule.update(gradient[part], values, own)
            if update.data_ptr() != updates[part].data_ptr():
                updates[part].copy_(update)
            first, round = begin + part.start, context.round
            for name, moved in values.items():
                buffer = f"{owner}.{name}"
                self._rounding.write(moved, slots[name][part], fragment, first, buffer, round)
        return updates
