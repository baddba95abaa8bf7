"""A cluster that joins a run: who has to come to it first, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from dsx.engines.joined import expect_joined, refuse_joining


def test_a_loop_that_has_not_come_to_the_others_is_told_in_its_first_step() -> None:
    handle: Any = SimpleNamespace(joining=SimpleNamespace(is_due=True))
    steps: list[Callable[[], None]] = []
    expect_joined(handle, steps.append)
    with pytest.raises(RuntimeError, match=r"call optimizer.dsx.settle\(\) before the training"):
        steps[0]()
    handle.joining.is_due = False
    steps[0]()


def test_what_is_not_served_is_named_to_who_joins_alone() -> None:
    world: Any = SimpleNamespace(joins=None, cluster_id=2)
    refuse_joining(world, "dsx.run")
    world.joins = object()
    with pytest.raises(ValueError, match="cluster 2 would join: that is not served with dsx.run"):
        refuse_joining(world, "dsx.run")
