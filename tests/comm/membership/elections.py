"""Directed scenarios of founding, elections, copies and commits."""

from __future__ import annotations

from dsx.comm.membership.entries import Commit, Said, contributor_of
from dsx.comm.membership.replica import Replica
from tests.comm.membership.directed import (
    append_alone,
    begin_with,
    commits_more,
    commits_nothing,
    goes_on,
    in_view,
    leader_of,
    still,
)
from tests.comm.membership.world import World, need


def one_founding(seed: int) -> None:
    """An answer that was long under way does not count: its sender has joined a run since."""
    world = still(seed, 3)
    outside, unasked = {2}, set[int]()
    world.drops = lambda a, b, kind: (
        (kind == "Status" and a in outside) or (kind == "AskForLogs" and b in unasked)
    )  # fmt: skip
    world.run_until(lambda: in_view(world, {0, 1}), "0 and 1 without 2")
    unasked.add(2)
    world.kill(0)
    outside.add(0)
    world.begin(0)
    world.run_until(lambda: in_view(world, {1}), "1 alone, as 0 has restarted")
    world.run_until(lambda: len(world.replica(0).links) == 2, "0 has met both")
    world.slow.add((2, 0))
    unasked.clear()
    world.run_for(300)  # 2 answers that it has no log
    outside.remove(2)
    world.run_until(lambda: in_view(world, {1, 2}), "2 has joined")
    world.kill(1)
    outside.add(1)
    world.begin(1)
    world.run_until(lambda: in_view(world, {2}), "2 alone, as 1 has restarted")
    world.run_for(500)  # 1 answers, too
    world.slow.clear()
    world.run_for(1000)
    outside.clear()
    goes_on(world)


def write_alone(world: World, leader: int, num_entries: int) -> None:
    """Let a coordinator append much that nobody gets, and then hang."""
    for i in range(num_entries):
        append_alone(world, leader, Said(f"x{i}", "", leader))
    world.frozen = {leader}


def old_log(seed: int) -> None:
    """A coordinator writes much that nobody gets, sleeps, and stands when its heir is dead."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    write_alone(world, leader, 300)
    rest = set(world.nodes) - {leader}
    world.run_until(lambda: in_view(world, rest), "the others go on")
    heir = leader_of(world, rest)
    world.kill(heir)
    world.frozen = set()
    world.run_for(4000)
    world.begin(heir)
    goes_on(world)


def two_copies(seed: int) -> None:
    """As before, of five; those who would make it a quorum have begun anew, with short logs."""
    world = begin_with(seed, 5)
    leader = leader_of(world, range(5))
    write_alone(world, leader, 1500)
    world.drops = lambda a, b, kind: kind == "table"  # who begins anew does not get far
    others = set(range(5)) - {leader}
    world.run_until(lambda: in_view(world, others), "four go on")
    heir = world.replica(leader_of(world, others))
    while len(heir.state.contributors) > 2:
        m = max(c.id for c in heir.state.contributors if c.id != heir.me.id)
        world.cut({frozenset((m, p)) for p in others - {m}} - world.cuts)
        world.run_until(lambda m=m: not contributor_of(heir.state.contributors, m), "one less")
    rest = {c.id for c in heir.state.contributors}
    world.heal()
    standings = [world.replica(m).standing for m in others - rest]
    world.run_until(lambda: all(s.answered == s.request > 0 for s in standings), "they begin anew")
    world.cut({frozenset((m, p)) for m in set(range(5)) - rest for p in rest})
    world.frozen = set()
    world.run_for(6000)
    world.drops = lambda a, b, kind: False
    goes_on(world)


def one_knows(seed: int) -> None:
    """A view grows from one that dies at once; only a joiner knows that the view is in force."""
    world = still(seed, 3, arbiter=1)
    outside = {1}
    world.drops = lambda a, b, kind: (
        (kind == "Status" and a in outside) or (kind == "table" and b == 2)
        or (kind == "Append" and b == 1 and world.replica(1).is_in_last_view)
    )  # fmt: skip
    world.run_until(lambda: world.replica(2).standing.answered, "2 follows, without a vote")
    outside.clear()
    known = world.replica(2)
    world.run_until(lambda: [c.id for c in known.state.contributors] == [0, 1], "0 takes 1 in")
    if world.replica(1).is_member:
        return  # it has heard, too
    world.kill(0)
    world.drops = lambda a, b, kind: False
    goes_on(world)


def short_copy(seed: int) -> None:
    """A new coordinator gives a joiner its copy, and dies before it gives anybody else a thing."""
    world = begin_with(seed, 5, arbiter=2)
    outside, replicas = {4}, world.replicas
    world.drops = lambda a, b, kind: kind == "Status" and a in outside
    world.kill(4)
    world.run_until(lambda: in_view(world, {0, 1, 2, 3}), "four contributors")
    world.begin(4)
    outside.clear()
    world.drops = lambda a, b, kind: (
        a == 0 and (kind == "Install" or (kind == "Append" and (b == 1 or holds(replicas[b], "e"))))
    )
    world.run_until(
        lambda: any(joiner.id == 4 for joiner in replicas[2].state.joiners),
        "2 has applied the join, 1 has not",
    )
    world.nodes[0].log.say("e", "")
    world.run_until(lambda: "e" in replicas[0].state.said, "the first coordinator has applied it")
    world.kill(0)
    world.drops = lambda a, b, kind: a != 4 and b != 4 and kind in ("Append", "data")
    for _ in range(4000):
        if world.replica(4).standing.answered:
            break
        world.step()
    else:
        return  # another has stood before 1
    world.kill(1)
    world.drops = lambda a, b, kind: False
    goes_on(world)


def holds(replica: Replica, key: str) -> bool:
    return any(isinstance(entry, Said) and entry.key == key for entry in replica.log.entries)


def late_promise(seed: int) -> None:
    """Who has promised takes nothing more of the old coordinator, though it lives after all."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    a, b = sorted(world.nodes.keys() - {leader})
    world.slow = {(leader, a), (leader, b), (b, a)}
    world.drops = lambda sender, receiver, kind: sender == b and kind == "Prepare"
    world.run_until(
        lambda: any(item[-1].startswith(b'[1,"Promise"') for item in world.queues[b, a]
                    if item[0] == "message"),
        "a promise is under way",
    )  # fmt: skip
    world.nodes[leader].log.say("x", "")
    world.flush(leader)
    world.slow = {(leader, a), (b, a)}
    world.run_for(100)  # the coordinator is heard again, and would have a quorum
    world.slow = {(leader, a)}
    world.run_for(1000)
    world.drops = lambda sender, receiver, kind: False
    goes_on(world)


def one_holds(seed: int) -> None:
    """What a dead coordinator had applied, one member alone holds; another one stands."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    lacks, holder = sorted(world.nodes.keys() - {leader})  # the first by id stands first
    world.drops = lambda a, b, kind: b == lacks and kind == "Append"
    world.nodes[leader].log.say("x", "")
    log = world.nodes[leader].log
    world.run_until(lambda: log.state.recalls("x"), "the coordinator has applied it")
    need(holds(world.replica(holder), "x"), "it was applied without a quorum")
    world.kill(leader)
    world.drops = lambda a, b, kind: False
    world.run_until(lambda: in_view(world, {lacks, holder}), "two go on")
    need(all(world.nodes[m].log.state.recalls("x") for m in (lacks, holder)), "it is lost")
    goes_on(world)


def forgotten_vote(seed: int) -> None:
    """One of the two that held a commit restarts; it has forgotten, and must not vote on it."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    forgets, lacks = sorted(world.nodes.keys() - {leader}, reverse=bool(seed % 2))
    world.drops = lambda a, b, kind: b == lacks and kind == "Append"
    replica = world.replica(lacks)
    world.nodes[leader].log.say("x", "")
    holders = [world.nodes[m].log for m in (leader, forgets)]
    world.run_until(lambda: all(log.state.recalls("x") for log in holders), "two have applied it")
    if replica.state.recalls("x"):
        return  # all three have
    world.frozen = {leader}
    world.kill(forgets)
    world.begin(forgets)
    world.drops = lambda a, b, kind: False
    commits_nothing(world)
    need(not set(world.leaders) - {leader}, "it votes on what it has forgotten")
    goes_on(world)


def old_report(seed: int) -> None:
    """A report of the view before is the last that the coordinator has; it does not count."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    right, wrong = sorted(world.nodes.keys() - {leader})
    epoch = world.replica(leader).state.epoch
    world.trainings[wrong].num_wrong = 1  # so the same members do it again in a new view
    world.drops = lambda a, b, kind: (
        world.replica(a).state.epoch > epoch
        and (
            (a == right and b == leader and kind == "Status")
            or (a == wrong and b == right and kind == "data")
        )
    )
    told = world.nodes[leader].log._coordinator.roll.told
    world.run_until(
        lambda: wrong in told and told[wrong].epoch > epoch and told[wrong].reports,
        "the one that was wrong reports the redo",
    )
    world.run_for(50)
    world.drops = lambda a, b, kind: False
    goes_on(world)


def silent_member(seed: int) -> None:
    """A process that hangs, with its connections up, does not hold the others."""
    world = begin_with(seed, 3)
    for silent in range(3):
        world.frozen = {silent}
        commits_more(world, 5)
        world.frozen = set()
        world.run_until(lambda: in_view(world, {0, 1, 2}), "it is back")


def lying_coordinator(seed: int) -> None:
    """It commits what nobody has made: contributors stop, and apply nothing of it."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    world.liar = leader
    liar = world.nodes[leader]
    liar.log._replica.standing.require_own = lambda commit: None  # it does not mind
    liar._follow_entry = lambda applied: None
    liar.due = lambda lane: None
    coordinator, replica = liar.log._coordinator, liar.log._replica
    world.run_until(lambda: coordinator.head.epoch == replica.state.epoch, "no view under way")
    n = coordinator.head.next_number("a")
    append_alone(world, leader, Commit("a", n, coordinator.head.epoch, "0" * 32))
    coordinator.lead()
    others = [m for m in world.nodes if m != leader]
    world.run_until(lambda: all(world.nodes[m].log.stopped for m in others), "all stop", 3000)
    for m in others:
        need(world.trainings[m].state["a"][0] <= n, "a lie was applied")
        need(f"cluster {m} stops: a/{n} of view" in world.nodes[m].log.stopped, "it says why")


def lost_run(seed: int) -> None:
    """Two of three end at once. The third has a log, so nothing is founded before it has ended."""
    world = begin_with(seed, 3)
    commits_more(world, 3)
    third = seed % 3
    for act in (world.kill, world.begin):
        for m in {0, 1, 2} - {third}:
            act(m)
    commits_nothing(world)
    world.kill(third)
    world.begin(third)
    goes_on(world)
    need(world.count["founded_again"] == 1, "no run was founded again")


def hopeless_view(seed: int) -> None:
    """Of two that do not reach each other one is dropped; the other one ends before it hears so."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    kept, dropped = sorted(set(world.nodes) - {leader})
    replica = world.replica(leader)
    world.drops = lambda a, b, kind: kind == "Append" and b == kept
    world.cut({frozenset((kept, dropped))})
    world.run_until(lambda: len(replica.views()) > 1, "a view without one of the two is under way")
    need(contributor_of(replica.views()[-1], dropped) is None, "it is the higher one's")
    world.kill(kept)
    world.drops = lambda a, b, kind: False
    world.run_until(lambda: in_view(world, {leader, dropped}), "the two who are left go on")
    world.heal()
    world.begin(kept)
    goes_on(world)


def found_by_one(seed: int) -> None:
    """One of three knows first that another is gone: nobody but that one is dropped."""
    world = begin_with(seed, 3)
    leader = leader_of(world)
    others = sorted(set(world.nodes) - {leader})
    for gone, first in (others, others[::-1]):
        world.cut({frozenset(others)})
        world.run_for(40)
        world.kill(gone)
        rest = {leader, first}
        world.run_until(lambda rest=rest: in_view(world, rest), "the two who are left go on")
        world.heal()
        world.begin(gone)
        world.run_until(lambda: in_view(world, {0, 1, 2}), "all are back")
