"""Where one cluster stands: what it has reported, says and asks for. All of it goes into a status.

A status is idempotent and says everything (P5): a lost one costs time and nothing else.
"""

from __future__ import annotations

from dsx.comm.membership.bounds import SAYINGS_PER_STATUS
from dsx.comm.membership.entries import Commit, Entry, Said, View
from dsx.comm.membership.messages import Report, Saying
from dsx.comm.membership.state import LogContradicted, State


class Standing:
    """Of a process that has just begun: it asks to join, and has nothing."""

    def __init__(self) -> None:
        self.sequence = 0
        self.sayings: dict[str, Saying] = {}
        self.is_leaving = False
        self.is_finished = False
        self.tries = 1  # each request has a number of its own, and so its own copy
        self.request = 1  # 0: is a contributor
        self.answered = 0  # the request whose copy has been begun
        self.ready = 0  # entries whose results are applied, once the copy is there
        self.is_whole = False  # has a whole state: its copy, or the founder's own
        self.asking = 0  # ticks since the request
        self._reports: dict[tuple[str, int], str] = {}  # lane, number: digest; of this epoch

    def found(self) -> None:
        """Begin the run with the own state."""
        self.is_whole = True

    def ask_again(self) -> None:
        """Ask for a new copy: the last one cannot be had any more, or is none."""
        self.tries += 1
        self.request, self.ready, self.asking = self.tries, 0, 0

    def begin_copy(self, request: int) -> None:
        """Throw away what was; the copy of that request is under way."""
        self.answered, self.is_whole = request, False
        self._reports.clear()

    def lose(self) -> None:
        """What is here belongs to no place in the log any more."""
        self.is_whole = False
        self._reports.clear()

    def have_copied(self, request: int, index: int) -> None:
        """The copy of that request is here, and the results of `index` entries with it."""
        if request == self.answered:
            self.is_whole = True
            self.ready = index if request == self.request else 0

    def report(self, report: Report) -> None:
        """An attempt of the view in force has ended here."""
        lane, number, digest = report.lane, report.number, report.digest
        known = self._reports.setdefault((lane, number), digest)
        if known != digest:
            raise ValueError(
                f"{lane}/{number} was reported as {known} and now as {digest}: an attempt has one "
                "result; a redo belongs to a later view"
            )

    @property
    def reports(self) -> tuple[Report, ...]:
        """The attempts of this epoch that have ended here and are not committed."""
        return tuple(Report(*which, digest) for which, digest in sorted(self._reports.items()))

    @property
    def next_sayings(self) -> tuple[Saying, ...]:
        """The oldest ones that are not in the log; the others follow."""
        return tuple(self.sayings.values())[:SAYINGS_PER_STATUS]

    def require_own(self, commit: Commit) -> None:
        """Raise LogContradicted unless that is what was reported here (S9).

        A commit follows only what all contributors have reported. Whoever commits anything else
        lies or errs, and what it commits must not get into the model.
        """
        held = self._reports.get((commit.lane, commit.number), "nothing")
        if held != commit.digest:
            raise LogContradicted(
                f"{commit.lane}/{commit.number} of view {commit.epoch} was committed as "
                f"{commit.digest}; held here: {held}"
            )

    def take_up(self, entry: Entry, state: State, is_member: bool) -> None:
        """Follow an entry that has been applied, with the state after it."""
        if isinstance(entry, View):
            self._reports.clear()  # a view ends all attempts
            if is_member and self.is_whole:
                # one without a whole state goes on asking, or it would hold all others up
                self.request = self.ready = self.answered = 0
        elif isinstance(entry, Commit):
            self._reports.pop((entry.lane, entry.number), None)
        elif isinstance(entry, Said):
            self.sayings.pop(entry.key, None)
