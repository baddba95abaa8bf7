"""One ordered log that all clusters follow: who contributes, what is committed, what was said.

A pure state machine: events in (`participant`), actions out (`actions`), time in ticks from
outside; no I/O, no threads, no clocks, no randomness. docs/develop/membership.md has the protocol
in one picture. Its rules have names, and each is named where it is enforced:

Safety
  S1 One coordinator appends under a ballot that is nobody else's, and whoever has promised a ballot
     takes nothing of a lower one: so a deposed coordinator changes nothing.
  S2 An entry is applied once a quorum of the view before it holds it, and, if it is a view, of that
     view, too: so any two quorums that could decide about one place in the log share a member.
  S3 A new coordinator asks a quorum of each view concerned for their logs, and goes on from the one
     accepted under the highest ballot, then the longest: every applied entry is in it.
  S4 The first append (or copy) under a new ballot replaces all that is not applied, and brings all
     of the coordinator's log: so a log is never a mix, and has what was applied under lower ones.
  S5 A log is in memory only. A process that restarts is another incarnation, without a vote until a
     view takes it in: so a vote is never forgotten by one who still has it.
  S6 A commit is appended once all contributors of the view in force have reported one digest for
     the attempt (number, epoch), and a view ends attempts: each contributor holds what is
     committed, and no commit of an older epoch follows a view.
  S7 A joiner becomes a contributor only with every result that was committed before.
  S8 A run is founded while no process has a log of another.
  S9 A contributor that is told a commit of what it has not reported stops, and says so.
  S10 A view that an operator has forced begins a branch: whoever follows one takes nothing of
     another, but a word that it was left out, and joins with a copy.
Progress
  P1 A coordinator is sticky: no promise to others while it lives. One without a quorum resigns.
  P2 Candidates stand one after the other, by id; one that is too far behind does not stand.
  P3 A view keeps who is heard from and linked with all others; who is silent or cut off is dropped,
     where two do not reach each other a moment later, as one may be gone (`Timing.doubt`).
  P4 Commits wait a moment for a joiner that is near: from farther and longer with each try.
  P5 A status says all there is to know of a cluster, so a lost message costs time, nothing else.
  P6 All that travels or is kept has a bound; who lags by more than the log keeps joins again.
"""
