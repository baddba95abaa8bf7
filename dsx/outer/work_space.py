"""How long the vectors are that launches and outer steps work in: a part of a fragment, or all.

Where every policy does the same to each element, which it says of itself (`takes_parts`), a step
is taken a part at a time (parts.py), and what it works in is as long as a part. It is as long as
the longest fragment where a fragment is one part, and where what is measured is all of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from dsx.core.types import Fragment
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterOptimizer
from dsx.outer.passing_on import passes_on

LONGEST = 2**20  # elements of a part
_GIVEN = ("contribution", "gradient", "merge", "update", "weigh", "remember")  # vectors


def is_cut(method: Method, rule: OuterOptimizer | None = None) -> bool:
    """Whether a launch, or the outer step that `rule` takes on a host, is taken in parts."""
    asked = (method.delay,) if rule is None else (method.delay, rule)
    return all(says(policy, "takes_parts") for policy in asked) and (
        rule is None or method.staleness.leaves_mean
    )


def part_length(
    numel: int, method: Method, is_on_accelerator: bool, rule: OuterOptimizer | None = None
) -> int:
    """Return the elements of a part of a fragment of `numel`, of all parts but the last.

    Of a launch, or of the outer step that `rule` takes; `is_on_accelerator`: where the state is.
    """
    is_whole = is_on_accelerator or not is_cut(method, rule)
    return numel if is_whole else min(numel, LONGEST)


def says(policy: object, flag: str) -> bool:
    """Whether a policy says so, of what it does itself: not a class that it has been made of."""
    for kind in type(policy).__mro__:
        if flag in vars(kind):
            return bool(getattr(policy, flag))
        if any(name in vars(kind) for name in _GIVEN):
            return False
    return False


def work_lengths(
    method: Method,
    fragments: Sequence[Fragment],
    is_on_accelerator: bool,
    is_on_disk: bool,
) -> dict[str, int]:
    """Return the elements of each vector that a rank works in, by purpose, fp32.

    `fragments` are the rank's; `is_on_accelerator`: outer steps are taken there; `is_on_disk`: the
    state is.
    """
    whole = max((fragment.numel for fragment in fragments), default=0)
    part = part_length(whole, method, is_on_accelerator, method.outer_optimizer)
    sees_all = method.staleness.is_active or not method.outer_optimizer.keeps_anchor
    lengths = {
        "mean": part,
        "work": whole if sees_all else part,
    }
    is_elementwise = method.staleness.is_active and method.staleness.is_elementwise
    if method.delay.needs_local or is_elementwise:
        lengths["local"] = whole if is_elementwise else part
    if passes_on(method, is_on_accelerator, is_on_disk):
        lengths["next"] = part
    if method.measures_tensors:
        lengths["fold"] = whole
    return lengths
