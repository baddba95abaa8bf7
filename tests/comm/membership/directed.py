"""What directed scenarios begin with, and what they ask of a world."""

from __future__ import annotations

from typing import Any

from tests.comm.membership.world import World, need


def begin_with(seed: int, size: int, arbiter: int | None = None, lanes: str = "a") -> World:
    """Return a world without chance's faults, in which all contribute."""
    world = still(seed, size, arbiter, lanes)
    world.run_until(lambda: in_view(world, set(range(size))), f"{size} contributors")
    return world


def still(seed: int, size: int, arbiter: int | None = None, lanes: str = "a") -> World:
    quiet = dict(loss=0, repeats=0, swaps=0)
    return World(seed, size=size, arbiter=arbiter, lanes=list(lanes), **quiet)


def in_view(world: World, ids: set[int]) -> bool:
    return all(
        world.nodes[m].log.is_contributor
        and {c.id for c in world.nodes[m].log.state.contributors} == ids
        for m in ids
    )


def leader_of(world: World, among: Any = (0, 1, 2)) -> int:
    world.run_until(lambda: set(world.leaders) & set(among), "a coordinator")
    return next(m for m in among if m in world.leaders)


def goes_on(world: World) -> None:
    need(world.finish(), "no quorum lives")


def append_alone(world: World, leader: int, entry: Any) -> None:
    """Let a coordinator append an entry, and tell nobody."""
    world.nodes[leader].log._coordinator._append(entry)


def commits_more(world: World, num_commits: int) -> None:
    goal = world.count["commits"] + num_commits
    world.run_until(lambda: world.count["commits"] >= goal, f"{num_commits} commits more")


def commits_nothing(world: World, num_events: int = 3000) -> None:
    before = world.count["commits"]
    world.run_for(num_events)
    need(world.count["commits"] == before, "somebody goes on who must not")
