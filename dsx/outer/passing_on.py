"""Whether a mean that is applied leaves its memory to the launch of the same boundary.

Where rounds are under way, a fragment's mean is applied right behind its next launch. What that
sends is then made as the mean is used up, part by part, in its place: a transfer that waits for its
mean, what it has sent, and what the next one sends are so two vectors and not three. Nothing else
of a launch changes: what it tells, and when it was, are of before the mean is applied.

So it is on a host, where codes are made by the exchange, and nothing is kept of a launch for the
mean that comes of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsx.core.types import Fragment
from dsx.method.delay.base import DelayPolicy
from dsx.method.method import Method


def passes_on(method: Method, is_on_accelerator: bool, is_on_disk: bool) -> bool:
    """Whether launches of a method take the memory of means, with its state where it is said."""
    delay = method.delay
    is_next = delay.rounds_under_way > 0 and type(delay).is_ripe is DelayPolicy.is_ripe
    is_plain = method.keeps is None and not method.encodes_at_launch
    return is_next and is_plain and not (method.schedule.when or is_on_accelerator or is_on_disk)


def lent_bytes(
    method: Method, on_the_wire: Sequence[Fragment], is_on_accelerator: bool, is_on_disk: bool
) -> int:
    """Return the bytes of host memory more, for a while, that launches of all fragments are lent.

    Where none can take the memory of a mean: a boundary is left for a stop, or a round made again.
    """
    is_lent = passes_on(method, is_on_accelerator, is_on_disk)
    return 4 * sum(fragment.numel for fragment in on_the_wire) if is_lent else 0
