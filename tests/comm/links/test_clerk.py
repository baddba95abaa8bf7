"""The log says who is left: over links, with clerks that nobody tells anything."""

from __future__ import annotations

import random
import threading
import time

import pytest

from dsx.comm.links.rank_views import packed, unpacked
from dsx.core.leaving import LOST, Reason
from dsx.core.transport import PeerLost, PeerPreempted, Submission
from tests.comm.links.clusters import Line
from tests.comm.links.sites import Site, members, run
from tests.comm.links.test_members_lost import LAST, NUM_STEPS, check
from tests.tiny import ALL_CASES, TinyNet, mean_loss


def cut_short(what: Submission) -> int | None:
    return 1 if what.step >= LAST else None


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_majority_goes_on_by_itself(victim: int) -> None:
    """Also where the first one is lost, which leads the log."""
    longest: dict[int, float] = {}

    last: dict[int, float] = {}

    def before(site: Site, step: int) -> None:
        now = time.monotonic()
        if step > 2:
            longest[site.id] = max(longest.get(site.id, 0.0), now - last[site.id])
        last[site.id] = now

    method = ALL_CASES["recommended"].method(3)
    sites = run(
        method, TinyNet(), mean_loss, NUM_STEPS, fates={victim: cut_short}, before=before,
        by_log=True,
    )  # fmt: skip
    left = [site for site in sites if site.id != victim]
    assert sites[victim].is_over.is_set()
    check(left, epoch=left[0].epochs[-1])
    assert left[0].epochs[-1] > 1
    assert max(longest[site.id] for site in left) < 10


@pytest.mark.parametrize("lost", [0, 1])
def test_of_two_the_arbiter_goes_on_alone_and_the_other_one_never(lost: int) -> None:
    method = ALL_CASES["diloco"].method(2)
    if lost == 1:
        sites = run(
            method, TinyNet(), mean_loss, NUM_STEPS, 2, {1: cut_short}, by_log=True, arbiter=0
        )
        assert sites[0].loop is not None and sites[0].loop.history.step == NUM_STEPS
        assert sites[0].loop.history.rounds == sites[0].loop.history.launches
    else:
        with pytest.raises(PeerPreempted, match="cluster 0 is lost .*clusters 0, 1 are left"):
            run(method, TinyNet(), mean_loss, NUM_STEPS, 2, {0: cut_short}, by_log=True, arbiter=0)


def test_of_two_without_an_arbiter_who_is_left_is_told_to_save_and_end() -> None:
    method = ALL_CASES["recommended"].method(2)
    with pytest.raises(PeerPreempted) as told:
        run(method, TinyNet(), mean_loss, NUM_STEPS, 2, {1: cut_short}, by_log=True)
    assert told.value.reason.signal == LOST and told.value.reason.cluster == 1
    assert told.value.reason.sentence == "cluster 1 is lost, and the run cannot go on without it"


def test_who_is_reached_late_at_the_start_is_not_taken_for_gone() -> None:
    """Two of three reach each other at once, and the first one 1.5 seconds later."""

    def late(line: Line) -> None:
        line.is_open = False
        threading.Timer(1.5, lambda: setattr(line, "is_open", True)).start()

    method = ALL_CASES["diloco"].method(3)
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, by_log=True, line=late)
    check(sites, epoch=0, left=3)


def test_at_the_end_nobody_who_leaves_is_missed() -> None:
    """All have finished; one leaves at once, the others later."""

    def before(site: Site, step: int) -> None:
        if step == NUM_STEPS:
            assert site.clerk is not None
            site.clerk.finish()

    method = ALL_CASES["diloco"].method(3)
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, before=before, by_log=True)
    assert [site.epochs[-1] for site in sites] == [0, 0, 0]


def test_a_transport_that_fails_says_so_to_what_comes_later() -> None:
    with pytest.raises(PeerLost):
        run(
            ALL_CASES["diloco_delayed"].method(2), TinyNet(), mean_loss, NUM_STEPS, 2,
            {1: cut_short}, by_log=True,
        )  # fmt: skip


def test_what_a_member_says_that_is_no_message_ends_nothing() -> None:
    """Thousands of them, of which a few are told."""
    noise = random.Random(3)

    def before(site: Site, step: int) -> None:
        if site.id == 2 and step == 6:
            for _ in range(3000):
                site.link.ask((0, 0), b"L" + noise.randbytes(noise.randrange(200)))

    method = ALL_CASES["recommended"].method(3)
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, before=before, by_log=True)
    assert [site.epochs[-1] for site in sites] == [0, 0, 0]
    assert all(site.loop is not None and site.loop.history.step == NUM_STEPS for site in sites)


def test_other_ranks_hear_what_the_first_one_is_told() -> None:
    view, lost, ended = members(3, [0, 2], 4), PeerLost("why"), PeerPreempted("too few")
    lost.cluster, ended.cluster, ended.reason, ended.gone = 1, 1, Reason(1, LOST), (1, 3)
    assert unpacked(packed(view).encode()) == view
    for error in (lost, ended):
        heard = unpacked(packed(error).encode())
        assert type(heard) is type(error) and vars(heard) == vars(error)
        assert str(heard) == str(error)
