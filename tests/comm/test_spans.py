"""Who averages which launches, as all members plan it from what each has told."""

from __future__ import annotations

from typing import Any

from dsx.comm.spans import must_begin_again, plan_spans
from dsx.core.membership import Member, Membership

A, B, C = (0, 5), (1, 5), (2, 9)  # cluster, process


def view(*marks: tuple[int, int]) -> Membership:
    return Membership(3, tuple(Member(id, process=process) for id, process in marks), (0, 1, 2))


def told(
    spans: list[tuple[int, list[tuple[int, int]]]], last: int, lowest: int, is_stale: bool = False
) -> dict[str, Any]:
    return {"spans": spans, "last": last, "lowest": lowest, "is_stale": is_stale}


def test_who_comes_has_its_part_from_the_first_launch_that_nobody_has_submitted() -> None:
    everyone = [told([(0, [A, B])], 6, 5), told([(0, [A, B])], 7, 6), told([], 5, 6)]
    assert plan_spans(everyone, view(A, B, C)) == [(0, {A, B}), (8, {A, B, C})]
    assert not must_begin_again(everyone, plan_spans(everyone, view(A, B, C)), view(A, B, C))


def test_what_is_over_for_all_is_left_out() -> None:
    spans = [(0, [A, B]), (8, [A, B, C])]
    everyone = [told(spans, 12, 9), told(spans, 11, 8), told(spans[1:], 11, 10)]
    assert plan_spans(everyone, view(A, B, C)) == [(8, {A, B, C})]


def test_who_is_lost_before_its_part_leaves_one_span() -> None:
    """One of two has learned from where it was to have it, and the other one has not."""
    everyone = [told([(0, [A, B]), (8, [A, B, C])], 9, 6, True), told([(0, [A, B])], 9, 6)]
    planned = plan_spans(everyone, view(A, B))
    assert planned == [(0, {A, B})]
    assert must_begin_again(everyone, planned, view(A, B))


def test_a_span_that_one_of_its_members_lacks_is_begun_again() -> None:
    """The next comes while one has not heard from where the one before has its part."""
    d = (3, 11)
    everyone = [
        told([(0, [A, B]), (8, [A, B, C])], 9, 6), told([(0, [A, B])], 9, 6),
        told([(8, [A, B, C])], 8, 9), told([], 0, 1),
    ]  # fmt: skip
    after = Membership(4, (*view(A, B, C).members, Member(3, process=11)), (0, 1, 2, 3))
    planned = plan_spans(everyone, after)
    assert planned == [(0, {A, B}), (8, {A, B, C}), (10, {A, B, C, d})]
    assert must_begin_again(everyone, planned, after)


def test_another_process_of_a_cluster_is_another_member() -> None:
    before = (2, 7)
    everyone = [told([(0, [A, B, before])], 4, 5, True), told([(0, [A, B, before])], 4, 5, True)]
    everyone.append(told([], 0, 1))
    assert plan_spans(everyone, view(A, B, C)) == [(0, {A, B}), (5, {A, B, C})]
