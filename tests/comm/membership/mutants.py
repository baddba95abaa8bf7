"""Mistakes made by hand in one place each; a scenario or a seed must catch every one.

Caught means that an invariant breaks, or that nothing goes on any more; any other exception does
not count. `by` is who caught it last, and is tried first. One by hand, which prints who catches it:

    python -m tests.comm.membership.mutants half of a view is a quorum
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
SEEDS_PER_SCENARIO, SEEDS = 4, 120


@dataclass(frozen=True)
class Mutant:
    """`old`, which is there once in a module, becomes `new`."""

    what: str
    module: str
    old: str
    new: str
    by: tuple[str, int] = ("seed", 0)


LOG, MODEL = "dsx.comm.membership.", "tests.comm.membership.cluster"
MUTANTS = [
    Mutant(
        "applies what is appended, before a quorum holds it", LOG + "coordinator",
        "            if not all(replica.is_quorum(view, processes) for view in views):\n"
        "                return\n",
        "",
        ("lost_run", 0),
    ),
    Mutant(
        "a view needs the new quorum only", LOG + "coordinator",
        "views.append(entry.contributors)", "views = [entry.contributors]",
        ("lost_run", 0),
    ),
    Mutant(
        "half of a view is a quorum", LOG + "quorum",
        "if 2 * _votes(here, arbiter) > _votes(", "if 2 * _votes(here, arbiter) >= _votes(",
        ("even_split", 0),
    ),
    Mutant(
        "a restarted cluster keeps its vote", LOG + "quorum",
        "if processes.get(c.id) == c.incarnation]", "if c.id in processes]",
        ("forgotten_vote", 0),
    ),
    Mutant(
        "the arbiter decides alone", LOG + "quorum",
        "sum(2 + (c.id == arbiter)", "sum(2 + 9 * (c.id == arbiter)",
        ("three_with_arbiter", 0),
    ),
    Mutant(
        "one of two goes on though the other may be alive", LOG + "quorum",
        "len(here) == len(ended) == 1", "len(here) == 1",
        ("two_without_arbiter", 0),
    ),
    Mutant(
        "who is said not to go on still has a vote", LOG + "replica",
        "self.newest, self.arbiter, self.out)", "self.newest, self.arbiter)",
        ("a_half_goes_on", 0),
    ),
    Mutant(
        "what another branch says is followed", LOG + "branches",
        "    branch = branch_of(message)\n", "    return True\n",
        ("two_runs", 0),
    ),
    Mutant(
        "who has gone on is told that he was left out, and obeys", LOG + "replica",
        "if message.epoch > self.state.epoch:", "if message.epoch > 0:",
        ("two_runs", 0),
    ),
    Mutant(
        "a force does not begin a branch", LOG + "replica",
        "replace(self.promised, branch=branch)", "replace(self.promised)",
        ("two_runs", 0),
    ),
    Mutant(
        "a new coordinator keeps its own log", LOG + "election",
        "if promise.start <= replica.state.index and rank > best:", "if False:",
        ("one_holds", 0),
    ),
    Mutant(
        "a log that has no joint with one's own is taken on", LOG + "election",
        "if promise.start <= replica.state.index and rank",
        "if promise.start <= replica.log.end and rank",
        ("two_copies", 1),
    ),
    Mutant(
        "a coordinator waits for ever for a view that has no quorum", LOG + "coordinator",
        "if self._hopeless_for > replica.timing.hopeless:", "if False:",
        ("hopeless_view", 0),
    ),
    Mutant(
        "what a coordinator has not decided is taken for what may be", LOG + "election",
        "            if promise.accepted.is_of(me.id, me.incarnation):\n                continue\n",
        "",
        ("hopeless_view", 0),
    ),
    Mutant(
        "what was taken over from another is left out", LOG + "election",
        "max(replica.state.index, self._taken_over)", "replica.state.index",
        ("patient seed", 4853),
    ),
    Mutant(
        "a joiner whose place was cut off waits for ever", LOG + "replica",
        "or not self.standing.request\n", "or True\n",
        ("patient seed", 1656),
    ),
    Mutant(
        "who does not reach one that is gone is dropped with it", LOG + "roll",
        "count <= self._replica.timing.doubt", "count <= 0",
        ("found_by_one", 0),
    ),
    Mutant(
        "a candidate hears nothing from who has no vote", LOG + "election",
        "        for peer in replica.links:\n",
        "        for peer in replica.links.keys() & {c.id for c in replica.views()[-1]}:\n",
        ("one_knows", 0),
    ),
    Mutant(
        "a joiner's copy comes without the rest of the log", LOG + "replication",
        "Install(replica.accepted, joiner.request, replica.state, tail)",
        "Install(replica.accepted, joiner.request, replica.state, ())",
        ("short_copy", 2),
    ),
    Mutant(
        "a promise does not bind", LOG + "election",
        "            replica.follow(candidate)\n", "",
        ("late_promise", 0),
    ),
    Mutant(
        "the longest log wins, not the one accepted last", LOG + "election",
        "rank = (promise.accepted, promise.start", "rank = (replica.accepted, promise.start",
        ("old_log", 1),
    ),
    Mutant(
        "appends of a deposed coordinator are taken", LOG + "participant",
        "            if not replica.is_deposed(peer, message.ballot):\n", "            if True:\n",
        ("old_log", 0),
    ),
    Mutant(
        "commits once a majority reports", LOG + "coordinator",
        "            if None in digests.values():\n",
        "            digests = {id: digest for id, digest in digests.items() if digest}\n"
        "            if 2 * len(digests) <= len(reports):\n",
        ("seed", 0),
    ),
    Mutant(
        "commits without comparing digests", LOG + "coordinator",
        "            if len(set(digests.values())) > 1:\n", "            if False:\n",
        ("old_report", 0),
    ),
    Mutant(
        "commits an attempt of an older view", LOG + "roll",
        "status is not None and status.epoch == head.epoch  #", "status is not None  #",
        ("old_report", 0),
    ),
    Mutant(
        "a joiner is taken in before it has followed", LOG + "roll",
        "is_whole = status.ready >= max(head.committed, 1)", "is_whole = True",
        ("one_knows", 0),
    ),
    Mutant(
        "the log is cut before all have applied it", LOG + "replication",
        "replica.log.cut(min(replica.floor, replica.state.index))",
        "replica.log.cut(replica.state.index)",
        ("seed", 0),
    ),
    Mutant(
        "the log is kept until all have applied it, however long that takes", LOG + "replication",
        "max(min(floors), self._start_of_kept())", "min(floors)",
        ("lagging", 0),
    ),
    Mutant(
        "a dead member stays in the view", LOG + "roll",
        "return is_linked and self._quiet[one.id] <= self._replica.timing.patience", "return True",
        ("one_founding", 0),
    ),
    Mutant(
        "a silent member stays in the view", LOG + "roll",
        "return is_linked and self._quiet[one.id] <= self._replica.timing.patience",
        "return is_linked",
        ("old_log", 0),
    ),
    Mutant(
        "a founder takes answers to an older question", LOG + "founding",
        "        if message.question == self._question:\n", "        if True:\n",
        ("one_founding", 0),
    ),
    Mutant(
        "who has a log says that it has none", LOG + "founding",
        "        if not self._is_of_a_run:\n", "        if True:\n",
        ("one_founding", 0),
    ),
    Mutant(
        "who has been left out founds a run of its own", LOG + "founding",
        "        return self._has_had_log\n", "        return self._replica.log.end > 0\n",
        ("a_half_goes_on", 0),
    ),
    Mutant(
        "a founder asks nobody", LOG + "founding",
        "return self._others <= self._empty", "return True",
        ("one_founding", 0),
    ),
    Mutant(
        "a contributor does not mind what is committed", LOG + "standing",
        "        if held != commit.digest:\n", "        if False:\n",
        ("lying_coordinator", 0),
    ),
    Mutant(
        "no new coordinator is ever elected", LOG + "election",
        "        return self._stand()\n", "        return None\n",
    ),
    Mutant(
        "the run ends once one has finished", LOG + "roll",
        "return all(s is not None and s.is_finished", "return any(s is not None and s.is_finished",
        ("the_end", 0),
    ),
    Mutant(
        "what is said is never forgotten", LOG + "state",
        "until = self.index + 1 + entry.lasts if entry.lasts else 0", "until = 0",
        ("first_saying_wins", 0),
    ),
    Mutant(
        "what is said is said again until all have heard it", LOG + "coordinator",
        "is_known = key in under_way or self", "is_known = self",
        ("said_once", 0),
    ),
    Mutant(
        "reports outlive the view that they are of", LOG + "standing",
        "            self._reports.clear()  # a view ends all attempts\n", "",
        ("even_split", 1),
    ),
    Mutant(
        "a result is applied when it is made", MODEL,
        "        self.log.done(lane, attempt.n, attempt.epoch, self.held[lane][2])\n",
        "        self.training.apply(lane, attempt.n, result)\n"
        "        self.log.done(lane, attempt.n, attempt.epoch, self.held[lane][2])\n",
    ),
    Mutant(
        "a redo takes a new contribution", MODEL,
        "            self.attempts, self.held = {}, {}\n",
        "            self.attempts, self.held, self.kept = {}, {}, {}\n",
    ),
    Mutant(
        "a new view does not end attempts", MODEL,
        "            self.attempts, self.held = {}, {}\n", "",
    ),
    Mutant(
        "slices are not checked", MODEL,
        "        if digest_of(data) != copy.table[lane][i]:\n            return",
        "        if False:\n            return",
        ("old_log", 0),
    ),
    Mutant(
        "a joiner does not follow the commits since its copy", MODEL,
        "                self.missing.append(missing)\n", "                pass\n",
    ),
    Mutant(
        "what was lost is not asked for again", MODEL,
        "            if attempt.age % ASK == 0:\n", "            if False:\n",
    ),
]  # fmt: skip


class Patched(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the mutant's module with the mistake in it."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.path = ROOT / (mutant.module.replace(".", "/") + ".py")
        self.source = self.path.read_text()
        assert self.source.count(mutant.old) == 1, f"{self.path} has not one {mutant.old!r}"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        source = self.source.replace(self.mutant.old, self.mutant.new)
        exec(compile(source, str(self.path), "exec"), module.__dict__)


def hunt(mutant: Mutant) -> str:
    """Return who catches a mutant, and how; empty if nobody does. Once per process."""
    sys.meta_path.insert(0, Patched(mutant))
    from dsx.comm.membership import participant
    from dsx.comm.membership.timing import Timing
    from tests.comm.membership.faults import run_seed
    from tests.comm.membership.scenarios import SCENARIOS

    def run_patiently(seed: int) -> object:
        """One who stands holds the others up for long, and asks again late: what is rare shows."""
        participant.Timing = lambda: Timing(again=12, candidacy=20)  # type: ignore[misc,assignment]
        try:
            return run_seed(seed)
        finally:
            participant.Timing = Timing  # type: ignore[misc]

    directed = {scenario.__name__: scenario for scenario in SCENARIOS}
    tries = [(name, seed) for seed in range(SEEDS_PER_SCENARIO) for name in directed]
    tries += [("seed", seed) for seed in range(SEEDS)]
    for name, seed in [mutant.by, *tries]:
        try:
            (directed | {"seed": run_seed, "patient seed": run_patiently})[name](seed)
        except AssertionError as error:  # Violation is one
            return f"{name} {seed}: {error}"[:200]
        except RecursionError:
            return f"{name} {seed}: does not end"
        except Exception as error:  # a crash: not what is looked for
            print(f"{name} {seed}: {error!r}", file=sys.stderr)
    return ""


if __name__ == "__main__":
    (chosen,) = [mutant for mutant in MUTANTS if mutant.what == " ".join(sys.argv[1:])]
    print(hunt(chosen))
