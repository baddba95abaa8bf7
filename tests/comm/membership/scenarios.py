"""What chance does not bring about often enough; each takes a seed, and raises Violation."""

from __future__ import annotations

from tests.comm.membership import elections, forced, partitions

SCENARIOS = [
    elections.one_founding, elections.lost_run, elections.old_log, elections.two_copies,
    elections.one_knows, elections.short_copy, elections.late_promise, elections.one_holds,
    elections.forgotten_vote, elections.old_report, elections.silent_member,
    elections.lying_coordinator, elections.hopeless_view, elections.found_by_one,
    partitions.minority_waits, partitions.even_split, partitions.two_without_arbiter,
    partitions.two_with_arbiter, partitions.three_with_arbiter, partitions.leaving,
    partitions.first_saying_wins, partitions.said_once, partitions.lagging, partitions.the_end,
    forced.a_half_goes_on, forced.told_in_part, forced.one_of_two, forced.two_runs,
    forced.most_of_the_rest, forced.under_way,
]  # fmt: skip
