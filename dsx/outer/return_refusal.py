"""Why nobody can come back into a run with some method."""

from __future__ import annotations

from dsx.method.method import Method


def why_not(method: Method) -> str:
    """Return why no cluster can come back in a run with this method; empty if it can."""
    optimizer = method.outer_optimizer
    if not optimizer.keeps_anchor:
        return f"{type(optimizer).__name__} keeps no outer parameters, which it would take"
    if optimizer.uses_inner_rate:
        return "outer steps use the inner rate (scale_by_lr), which is not known of steps before"
    return ""
