"""Many clusters in one process on a network that fails at random; checks the invariants always.

Messages of a pair keep their order while the connection lasts, but for those that chance swaps,
repeats or loses; pairs are served in random order. After every event:
- one order: any two clusters that have applied i entries have applied the same i;
- one result: no two clusters apply different results to (lane, n), and states follow from them;
- nothing uncommitted: what is applied is what the log commits, and every living contributor of
  that view holds it at that moment; no commit is of another epoch than the view in force;
- a contribution is made once per transfer, redone or not;
- no contributor is told a commit that it does not hold; no run is founded while another has a log.
At the end faults stop, and all that live must be contributors and get on with every lane.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

from dsx.comm.membership.entries import Commit, Contributor, Contributors, End, View
from dsx.comm.membership.participant import Participant
from dsx.comm.membership.replica import Replica
from tests.comm.membership.cluster import Cluster, digest_of


class Violation(AssertionError):
    """An invariant does not hold."""


def need(is_so: bool, what: str) -> None:
    if not is_so:
        raise Violation(what)


class Training:
    """The training side of a simulated cluster: a state per lane that is a chain of results."""

    def __init__(self, world: World, me: int) -> None:
        self.world, self.me, self.made = world, me, set[tuple[str, int]]()
        self.state: dict[str, list[Any]] = {lane: [0, ""] for lane in world.lanes}
        self.num_wrong = 0  # results to come that are wrong

    def contribute(self, lane: str, n: int) -> bytes:
        need((lane, n) not in self.made, f"{self.me} makes its contribution to {lane}/{n} again")
        need(self.state[lane][0] == n, f"{self.me} contributes to {lane}/{n} at {self.state[lane]}")
        self.made.add((lane, n))
        return f"{self.me}.{self.world.rng.random()}".encode()

    def combine(self, lane: str, n: int, parts: list[Any]) -> bytes:
        if self.num_wrong:
            self.num_wrong -= 1
            parts = [(-1, 0, str(self.world.rng.random()).encode())]
        return json.dumps([[m, w, x.decode()] for m, w, x in parts]).encode()

    def apply(self, lane: str, n: int, result: bytes) -> None:
        world = self.world
        key = (world.replica(self.me).branch, lane, n)
        need(self.state[lane][0] == n, f"{self.me} applies {lane}/{n} to {self.state[lane]}")
        need(world.results.setdefault(key, result) == result, f"two results of {key}")
        digest = digest_of(result)
        need(world.commits.get(key) == digest, f"{self.me} applies {key}, which is not committed")
        self.state[lane] = [n + 1, chained(self.state[lane][1], result)]

    def snapshot(self) -> dict[str, bytes]:
        return {lane: json.dumps(state).encode() for lane, state in self.state.items()}

    def load(self, states: dict[str, bytes]) -> None:
        self.state = {lane: json.loads(data) for lane, data in states.items()}
        for lane, (n, chain) in self.state.items():
            branch = self.world.replica(self.me).branch
            is_right = self.world.chain(branch, lane, n) == chain
            need(is_right, f"{self.me} has loaded a wrong {lane}/{n}")
        self.made = set()


def chained(chain: str, result: bytes) -> str:
    return hashlib.sha256(chain.encode() + result).hexdigest()[:12]


class World:
    """The clusters, the connections between them, and what is known to have happened."""

    def __init__(self, seed: int, **fixed: Any) -> None:
        self.rng = rng = random.Random(seed)
        self.size: int = rng.choice([2, 3, 3, 4, 5, 5])
        self.arbiter: int | None = rng.choice([None, None, 0, self.size - 1])
        self.lanes = ["a", "b"][: rng.choice([1, 2])]
        self.loss: float = rng.choice([0, 0.01, 0.03])
        self.repeats: float = rng.choice([0, 0, 0.02])
        self.swaps: float = rng.choice([0, 0, 0.03])
        self.__dict__.update(fixed)
        self.drops: Callable[[int, int, Any], bool] = lambda sender, receiver, message: False
        self.liar = -1
        self.nodes: dict[int, Cluster] = {}
        self.trainings: dict[int, Training] = {}
        self.frozen: set[int] = set()
        self.leaving: set[int] = set()
        self.incarnations = 0
        self.queues: dict[tuple[int, int], collections.deque[Any]] = collections.defaultdict(
            collections.deque
        )
        self.cuts: set[frozenset[int]] = set()
        self.slow: set[tuple[int, int]] = set()  # ways on which nothing arrives for now
        self.digests: dict[tuple[int, int], str] = {}  # by branch and index
        self.results: dict[tuple[int, str, int], bytes] = {}  # by branch, lane and number
        self.commits: dict[tuple[int, str, int], str] = {}
        self.count: collections.Counter[str] = collections.Counter()
        for m in range(self.size):
            self.begin(m)

    def replica(self, m: int) -> Replica:
        return self.nodes[m].log._replica

    @property
    def replicas(self) -> dict[int, Replica]:
        return {m: node.log._replica for m, node in self.nodes.items()}

    @property
    def leaders(self) -> list[int]:
        return [m for m, replica in self.replicas.items() if replica.is_leading]

    def chain(self, branch: int, lane: str, n: int) -> str:
        chain = ""
        for i in range(n):  # what was before a branch is that of the trunk
            key = (branch if (branch, lane, i) in self.results else 0, lane, i)
            chain = chained(chain, self.results[key])
        return chain

    # processes and connections

    def begin(self, m: int) -> None:
        self.incarnations += 1
        log = Participant(Contributor(m, self.incarnations), range(self.size), self.arbiter)
        self.trainings[m] = Training(self, m)
        self.nodes[m] = Cluster(log, self.lanes, self.trainings[m])
        replica, apply_next = log._replica, log._replica.apply_next

        def apply_and_check() -> None:
            apply_next()
            self.check_applied(m)

        replica.apply_next = apply_and_check  # type: ignore[method-assign]
        for peer in list(self.nodes):
            self.connect(m, peer)

    def connect(self, a: int, b: int) -> None:
        pair = frozenset((a, b))
        if a != b and a in self.nodes and b in self.nodes and pair not in self.cuts:
            for x, y in ((a, b), (b, a)):
                self.queues[x, y].append(("up", self.replica(x).me.incarnation))

    def disconnect(self, a: int, b: int, is_told: bool = True) -> None:
        for x, y in ((a, b), (b, a)):
            queue = self.queues[x, y]
            kept = [queue.popleft() for _ in range(self.rng.randint(0, len(queue)))]
            queue.clear()
            queue.extend(kept)
            if is_told:
                queue.append(("down", 0))

    def kill(self, m: int) -> None:
        del self.nodes[m], self.trainings[m]
        self.frozen.discard(m)
        self.leaving.discard(m)
        for peer in self.nodes:
            self.disconnect(m, peer)
            self.queues[peer, m].clear()

    def cut(self, pairs: Any) -> None:
        for pair in pairs:
            self.cuts.add(pair)
            self.disconnect(*sorted(pair))

    def part(self, side: set[int]) -> None:
        """Cut all lines between one side and the other."""
        pairs = [frozenset((x, y)) for x in range(self.size) for y in range(x)]
        self.cut([p for p in pairs if len(p & side) == 1 and p not in self.cuts])

    def heal(self) -> None:
        cuts, self.cuts = self.cuts, set()
        for pair in cuts:
            self.connect(*pair)

    # who may go on

    def views(self) -> list[Contributors]:
        """The view in force, and those that may come to be."""
        first = max(self.replicas.values(), key=lambda replica: replica.state.index)
        views = [first.state.contributors] if first.state.contributors else []
        for replica in self.replicas.values():
            for i, entry in enumerate(replica.log.entries, replica.log.base):
                if isinstance(entry, View) and i >= first.state.index:
                    views.append(entry.contributors)
        return views

    def may_go_on(self) -> bool:
        here = {m: replica.me.incarnation for m, replica in self.replicas.items()}
        views = self.views()
        return any(
            all(replica.is_quorum(view, here) for view in views)
            for m, replica in self.replicas.items()
            if not views or (
                replica.standing.is_whole
                and any((c.id, c.incarnation) == (m, here[m]) for c in views[-1])
            )
        )  # fmt: skip

    def may_lose(self, m: int) -> bool:
        """Whether the rest can still go on: no run survives losing more than its quorum."""
        rest = {p: replica.me.incarnation for p, replica in self.replicas.items() if p != m}
        if not rest:
            return False
        some = next(replica for p, replica in self.replicas.items() if p != m)
        return all(
            some.is_quorum(view, rest) or (
                len(view) == 2 and self.arbiter is None
                and any(rest.get(c.id) == c.incarnation for c in view)
            )
            for view in self.views()
        )  # fmt: skip

    # running

    def check_applied(self, m: int) -> None:
        """Check what a cluster has just applied; called between an entry and its effects."""
        replica = self.replica(m)
        state = replica.state
        if state.index == 1:  # only a founder's log begins here
            others = [r.log.end for p, r in self.replicas.items() if p != m]
            need(not any(others), f"{m} founds a run while others have a log")
            if (0, 1) in self.digests:  # all that was has died with its processes
                self.digests, self.results, self.commits = {}, {}, {}
                self.count["founded_again"] += 1
        known = self.digests.setdefault((replica.branch, state.index), state.digest)
        need(known == state.digest, f"two logs at {state.index}, seen in {m}")
        entry = replica.actions[-1].entry
        if not isinstance(entry, Commit) or self.liar >= 0:
            return
        lane, n = entry.lane, entry.number
        need(entry.epoch == state.epoch, f"{entry} in view {state.epoch}")
        key = (replica.branch, lane, n)
        if key in self.commits:
            need(self.commits[key] == entry.digest, f"two commits of {lane}/{n}")
            return
        self.commits[key] = entry.digest
        self.count["commits"] += 1
        for c in state.contributors:
            node = self.nodes.get(c.id)
            if node and self.replica(c.id).me.incarnation == c.incarnation:
                held = node.held.get(lane, (-1, -1, ""))[:3]
                need(held == (n, entry.epoch, entry.digest), f"{entry}; {c.id} holds {held}")

    def flush(self, m: int) -> None:
        node, rng = self.nodes[m], self.rng
        node.drain()
        for peer, header, data in node.out:
            kind = header[0] if header else data.split(b'"', 2)[1].decode()
            if rng.random() < self.loss or self.drops(m, peer, kind):
                continue
            if peer in self.nodes and frozenset((m, peer)) not in self.cuts:
                if kind == "slice" and rng.random() < 0.05:
                    data = b"?" + data[1:]
                item = ("message", self.replica(m).me.incarnation, header, data)
                queue = self.queues[m, peer]
                queue.append(item)
                if rng.random() < self.repeats:
                    queue.append(item)
                if rng.random() < self.swaps and len(queue) > 1 and queue[-2][0] == "message":
                    queue[-1], queue[-2] = queue[-2], queue[-1]
        node.out.clear()

    def step(self) -> None:
        """One event: a message arrives, or a tick passes somewhere."""
        rng = self.rng
        runs = self.nodes.keys() - self.frozen
        ready = [p for p, q in self.queues.items() if q and p[1] in runs and p not in self.slow]
        if not ready or rng.random() < 0.08:
            m = rng.choice(list(self.nodes))
            if m in self.frozen:
                return
            self.nodes[m].tick()
            for lane in self.lanes:
                n = self.nodes[m].due(lane)
                if n is not None and rng.random() < 0.3:
                    self.nodes[m].offer(lane, n, self.trainings[m].contribute(lane, n))
        else:
            a, m = rng.choice(ready)
            self.deliver(a, m, self.queues[a, m].popleft())
        self.flush(m)
        log = self.nodes[m].log
        need(not log.stopped or self.liar >= 0, log.stopped)
        if m in self.leaving and (log.request or not self.replica(m).is_member):
            self.count["left"] += 1
            self.kill(m)

    def deliver(self, sender: int, receiver: int, item: Any) -> None:
        node = self.nodes[receiver]
        if item[0] == "up":
            node.up(sender, item[1])
        elif item[0] == "down":
            node.down(sender)
        else:
            _, incarnation, header, data = item
            node.receive(sender, incarnation, header, data)

    def run_until(self, is_so: Callable[[], Any], what: str, limit: int = 20_000) -> None:
        for _ in range(limit):
            if is_so():
                return
            self.step()
        raise Violation(f"not reached: {what}")

    def run_for(self, num_events: int) -> None:
        for _ in range(num_events):
            self.step()

    def finish(self, limit: int = 30_000) -> bool:
        """Stop faults; raise if those who live do not get on. False: no quorum lives any more."""
        self.heal()
        self.frozen.clear()
        self.slow.clear()
        for training in self.trainings.values():
            training.num_wrong = 0
        if self.views() and self.may_go_on():
            self.settle(limit, is_complete=False)  # without those who are dead
        for m in range(self.size):
            if m not in self.nodes:
                self.begin(m)
        return self.settle(limit, is_complete=True)

    def settle(self, limit: int, is_complete: bool) -> bool:
        least: int | None = None
        for i in range(limit):
            self.step()
            if i % 200:
                continue
            for m in set(range(self.size)) - set(self.nodes):  # a leave that was under way
                if is_complete:
                    self.begin(m)
            logs = [node.log for node in self.nodes.values()]
            nexts = [log.state.next_number(lane) for log in logs for lane in self.lanes]
            if all(log.is_contributor for log in logs):
                least = max(nexts) + 3 if least is None else least
                if min(nexts) >= least:
                    return True
        if not self.may_go_on():
            return False
        raise Violation(f"no progress: {self.describe()}")

    def describe(self) -> list[Any]:
        return [
            (m, r.state.index, r.standing.request, r.is_leading, r.promised,
             [(c.id, c.incarnation) for c in r.state.contributors], r.standing.is_whole,
             len(self.nodes[m].missing))
            for m, r in self.replicas.items()
        ]  # fmt: skip


def has_ended(world: World) -> bool:
    return any(isinstance(e, End) for r in world.replicas.values() for e in r.log.entries)
