"""Directed scenarios of lines that are cut, of two clusters, of leaving and of the end."""

from __future__ import annotations

from dsx.comm.membership.actions import Applied
from dsx.comm.membership.entries import Said, contributor_of
from tests.comm.membership.directed import (
    begin_with,
    commits_more,
    commits_nothing,
    goes_on,
    in_view,
    leader_of,
)
from tests.comm.membership.world import need


def minority_waits(seed: int) -> None:
    """Of five, three go on and two do not; then all go on."""
    world = begin_with(seed, 5)
    minority = {seed % 5, (seed + 2) % 5}
    world.part(minority)
    majority = set(range(5)) - minority
    world.run_until(lambda: in_view(world, majority), "three go on")
    world.frozen = set(minority)
    commits_more(world, 5)
    world.frozen = set(majority)  # whatever happens now is the minority's
    commits_nothing(world)
    need(not set(world.leaders) & minority, "a minority has a coordinator")
    for m in minority:
        need(len(world.nodes[m].log.waits_for) >= 3, "it does not say whom it waits for")
    goes_on(world)


def even_split(seed: int) -> None:
    """Four are cut into halves: without an arbiter neither goes on, with one its half alone."""
    arbiter = (None, 1, 2)[seed % 3]
    world = begin_with(seed, 4, arbiter)
    halves = [{0, 1}, {2, 3}]
    world.part(halves[0])
    for half in halves:
        world.frozen = set(range(4)) - half
        if arbiter in half:
            world.run_until(lambda half=half: in_view(world, half), "the arbiter's half goes on")
            commits_more(world, 5)
        else:
            world.run_for(500)  # what both halves had agreed on may still be applied
            commits_nothing(world)
    goes_on(world)


def two_without_arbiter(seed: int) -> None:
    """Of two, one that is cut off waits, and goes on once the other's restart has been met."""
    world = begin_with(seed, 2)
    one, other = seed % 2, 1 - seed % 2
    world.part({one})
    world.run_for(500)
    commits_nothing(world)
    world.heal()
    commits_more(world, 5)
    world.kill(other)
    world.run_for(300)
    commits_nothing(world)
    need(world.nodes[one].log.waits_for == (other,), "it does not say whom it waits for")
    world.begin(other)
    world.drops = lambda a, b, kind: kind == "table"  # the restarted one cannot copy yet
    world.run_until(lambda: in_view(world, {one}), "it goes on alone")
    commits_more(world, 5)
    world.drops = lambda a, b, kind: False
    goes_on(world)


def two_with_arbiter(seed: int) -> None:
    """Of two, the arbiter goes on alone at once, and the other never does."""
    world = begin_with(seed, 2, arbiter=seed % 2)
    arbiter, other = seed % 2, 1 - seed % 2
    world.part({arbiter})
    world.frozen = {arbiter}
    world.run_for(300)
    commits_nothing(world)
    world.frozen = {other}
    world.run_until(lambda: in_view(world, {arbiter}), "the arbiter goes on")
    commits_more(world, 5)
    goes_on(world)
    world.kill(arbiter)
    world.run_for(300)
    commits_nothing(world)
    world.begin(arbiter)  # it has forgotten all; the run is lost
    commits_nothing(world)


def three_with_arbiter(seed: int) -> None:
    """Of three, any two go on: the arbiter decides even splits and nothing else."""
    arbiter = seed % 3
    world = begin_with(seed, 3, arbiter)
    world.part({arbiter})
    world.frozen = {0, 1, 2} - {arbiter}
    world.run_for(300)
    commits_nothing(world, 2000)
    world.frozen = {arbiter}
    world.run_until(lambda: in_view(world, {0, 1, 2} - {arbiter}), "two go on without it")
    commits_more(world, 5)
    goes_on(world)


def leaving(seed: int) -> None:
    """A cluster leaves, the coordinator, too: the others go on, and it is told so."""
    world = begin_with(seed, 3)
    leaver = leader_of(world) if seed % 2 else 2
    world.nodes[leaver].log.leave()
    rest = {0, 1, 2} - {leaver}
    world.run_until(lambda: in_view(world, rest), "the others go on")
    world.run_until(
        lambda: (
            not contributor_of(world.nodes[leaver].log.state.contributors, leaver)
            or world.nodes[leaver].log.request
        ),
        "it knows that it has left",
    )
    world.kill(leaver)
    commits_more(world, 5)


def first_saying_wins(seed: int) -> None:
    """All say one key at once: one value, the same everywhere, for as long as was asked."""
    world = begin_with(seed, 3)
    for m, node in world.nodes.items():
        node.log.say("stop", f"at {m}")
        node.log.say("round", f"of {m}", lasts=5)
    logs = [node.log for node in world.nodes.values()]
    world.run_until(lambda: all(log.state.recalls("stop") for log in logs), "it is said")
    need(len({log.state.said["stop"] for log in logs}) == 1, "two values were said")
    commits_more(world, 12)
    world.run_until(lambda: not any(log.state.recalls("round") for log in logs), "it is forgotten")
    logs[1].say("round", "again", lasts=0)
    world.run_until(lambda: all(log.state.recalls("round") for log in logs), "it is said again")
    need({log.state.said["round"].value for log in logs} == {"again"}, "the old value is back")
    need(len({log.state.said["stop"] for log in logs}) == 1, "it was forgotten")


def said_once(seed: int) -> None:
    """What is soon forgotten is in the log once, though who says it hears late that it is."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    for m, node in world.nodes.items():
        for i in range(20):
            node.log.say(f"{m}/{i}", "", lasts=1)
    said: list[str] = []
    follow = world.nodes[leader]._follow_entry

    def listen(applied: Applied) -> None:
        said.extend([applied.entry.key] if isinstance(applied.entry, Said) else [])
        follow(applied)

    world.nodes[leader]._follow_entry = listen  # type: ignore[method-assign]
    world.run_until(lambda: len(set(said)) == 60, "all is said")
    world.run_for(500)
    need(len(said) == 60, f"{len(said)} entries say 60 keys")


def lagging(seed: int) -> None:
    """One is cut from the coordinator's entries for longer than they are kept: it joins again."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    slow = next(m for m in world.nodes if m != leader)
    world.drops = lambda a, b, kind: b == slow and kind == "Append"
    for i in range(2500):
        world.nodes[leader].log.say(f"x{i}", "-" * 1900, lasts=1)
    log = world.replica(leader).log
    world.run_until(lambda: log.base > world.replica(slow).log.end, "its entries are cut off")
    need(log.num_bytes(log.base) < 1 << 19, "the log grows without bound")
    world.drops = lambda a, b, kind: False
    goes_on(world)


def the_end(seed: int) -> None:
    """All have finished: the run ends, nothing follows, and each may go once all know."""
    world = begin_with(seed, 3)
    world.loss = 0.03
    commits_more(world, 5)
    for node in list(world.nodes.values())[1:]:
        node.log.finish()
    world.run_for(300)
    need(not any(node.log.state.is_ended for node in world.nodes.values()), "ended too early")
    world.nodes[0].log.finish()
    lost = seed % 4  # 3: none
    world.run_until(lambda: any(n.log.state.is_ended for n in world.nodes.values()), "the end")
    last = max(node.log.state.index for node in world.nodes.values())
    if lost < 3:
        world.kill(lost)
    while world.nodes:
        world.run_until(lambda: any(n.log.is_over for n in world.nodes.values()), "one may go")
        one = next(m for m, node in world.nodes.items() if node.log.is_over)
        need(world.nodes[one].log.state.index == last, "something follows the end")
        if len(world.nodes) == 1:
            break
        world.kill(one)
