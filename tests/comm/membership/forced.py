"""Directed scenarios of views that an operator has forced."""

from __future__ import annotations

from collections.abc import Iterable

from dsx.comm.membership.entries import Said
from tests.comm.membership.directed import (
    append_alone,
    begin_with,
    commits_more,
    commits_nothing,
    goes_on,
    in_view,
    leader_of,
)
from tests.comm.membership.world import World, need

BRANCH = 1_795_000_000_000_000_000


def force(world: World, ids: Iterable[int], without: set[int], branch: int = BRANCH) -> None:
    """Tell clusters to go on without some."""
    ids = sorted(ids)
    world.run_until(
        lambda: not any(world.replica(m).links.keys() & without for m in ids), "they are apart"
    )
    for m in ids:
        world.nodes[m].log.force(without, branch)


def a_half_goes_on(seed: int) -> None:
    """Of four, two go on without the others, who are told so when they are back, and join."""
    world = begin_with(seed, 4)
    half, others = ({0, 1}, {2, 3}) if seed % 2 else ({1, 3}, {0, 2})
    world.part(half)
    world.run_for(500)
    commits_nothing(world)
    force(world, half, others)
    world.run_until(lambda: in_view(world, half), "the half goes on")
    commits_more(world, 5)
    tries = {m: world.replica(m).standing.tries for m in others}
    world.heal()
    world.run_until(lambda: in_view(world, {0, 1, 2, 3}), "all are back")
    for m in others:
        need(world.replica(m).standing.tries > tries[m], f"{m} is back without having joined")
        need(world.replica(m).branch == BRANCH, f"{m} follows another branch")
    commits_more(world, 5)
    goes_on(world)


def told_in_part(seed: int) -> None:
    """Of four, one of the two who are left has not heard it: both wait, and are told again."""
    world = begin_with(seed, 4)
    half, others = ({0, 1}, {2, 3}) if seed % 2 else ({1, 3}, {0, 2})
    world.part(half)
    first = min(half) if seed % 3 else max(half)
    force(world, {first}, others)
    world.run_for(500)
    commits_nothing(world)
    for m in half:
        need(set(world.nodes[m].log.waits_for) >= others, f"{m} says that it does not wait")
    force(world, half, others, BRANCH + 1)
    world.run_until(lambda: in_view(world, half), "the half goes on")
    commits_more(world, 5)


def one_of_two(seed: int) -> None:
    """Of two, one goes on alone, whether the other lives or not; it joins, or its restart does."""
    world = begin_with(seed, 2)
    one, other = seed % 2, 1 - seed % 2
    if seed % 3:
        world.kill(other)
    else:
        world.part({one})
    force(world, {one}, {other})
    world.run_until(lambda: in_view(world, {one}), "it goes on alone")
    commits_more(world, 5)
    goes_on(world)
    need(in_view(world, {0, 1}), "the other one has not joined")


def two_runs(seed: int) -> None:
    """Those who are left out have gone on by themselves: two runs, of which none takes anything."""
    world = begin_with(seed, 5)
    few, most = ({0, 1}, {2, 3, 4}) if seed % 2 else ({2, 4}, {0, 1, 3})
    world.part(few)
    world.run_until(lambda: in_view(world, most), "most go on")
    commits_more(world, 3)
    force(world, few, most)
    world.run_until(lambda: in_view(world, few), "few go on, too")
    commits_more(world, 5)
    world.heal()
    for _ in range(3):
        leader_of(world, few)
        leader_of(world, most)
        world.run_for(2000)
        need(in_view(world, few) and in_view(world, most), "one has taken up the other")
        for m in most | {min(few)}:  # both have to elect anew, with those of the other linked
            world.part({m})
        world.run_for(3000)
        world.heal()
        world.run_until(lambda: in_view(world, most), "most go on as before")
    before = [len({k for k in world.commits if k[0] == branch}) for branch in (0, BRANCH)]
    world.run_until(
        lambda: all(
            len({k for k in world.commits if k[0] == branch}) > count + 3
            for branch, count in zip((0, BRANCH), before, strict=True)
        ),
        "both go on",
    )


def most_of_the_rest(seed: int) -> None:
    """Three of six are left, by force: two of those go on, and one alone does not."""
    world = begin_with(seed, 6)
    rest = {0, 1, 2} if seed % 2 else {0, 2, 4}
    world.part(rest)
    force(world, rest, set(range(6)) - rest)
    world.run_until(lambda: in_view(world, rest), "three go on")
    one = min(rest) if seed % 3 else max(rest)
    world.part({one})
    world.run_until(lambda: in_view(world, rest - {one}), "two go on")
    commits_more(world, 3)
    world.frozen = set(range(6)) - {one}
    commits_nothing(world)
    world.frozen = set()
    goes_on(world)


def under_way(seed: int) -> None:
    """What a coordinator had appended, and one of those who are left held, is not lost to them."""
    world = begin_with(seed, 4)
    leader = leader_of(world, range(4))
    world.drops = lambda a, b, kind: a == leader and b != (leader + 1) % 4
    append_alone(world, leader, Said("key", "value", leader))
    held = world.replica((leader + 1) % 4)
    world.run_until(
        lambda: (
            any(isinstance(e, Said) and e.key == "key" for e in held.log.entries)
            or held.state.recalls("key")
        ),
        "one holds it",
    )
    gone = {leader, (leader + 2) % 4}
    for m in gone:
        world.kill(m)
    world.drops = lambda a, b, kind: False
    rest = set(range(4)) - gone
    force(world, rest, gone)
    world.run_until(lambda: in_view(world, rest), "the others go on")
    world.run_until(
        lambda: all(world.nodes[m].log.state.recalls("key") for m in rest), "both know it"
    )
    commits_more(world, 3)
    goes_on(world)
