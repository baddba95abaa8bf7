"""Half of the clusters is lost: the others wait, and go on where they were, or after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from dsx.core.transport import PeerLost, PeerPreempted, Submission
from tests.comm.links.clusters import Line, groups_of, two_links
from tests.comm.links.sites import Site, run
from tests.comm.links.test_healing import NUM_STEPS as UNTIL_HEALED
from tests.comm.links.test_healing import check as check_healed
from tests.comm.links.test_healing import slowly
from tests.comm.links.test_members_lost import LAST, NUM_STEPS, TINY, are_equal, parameters
from tests.tiny import ALL_CASES

WAIT = 100.0


def until(what: Callable[[], object]) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.01)


def waits(site: Site) -> bool:
    return site.clerk is not None and site.clerk.quorum.waiting is not None


class Cut:
    """A line that is cut behind a step, and whole again once all have waited for a while."""

    def __init__(self, seconds: float = 0.3) -> None:
        self._seconds = seconds
        self.line: Line | None = None
        self.steps: list[int] = []  # of each site, when it had waited
        self.has_been = False

    def take(self, line: Line) -> None:
        self.line = line

    def before(self, site: Site, step: int) -> None:
        line = self.line
        if step == LAST and site.id == 1 and line is not None and not self.has_been:
            self.has_been, line.is_open = True, False
            line.cut()

    def watch(self, sites: list[Site]) -> None:
        until(lambda: self.has_been and all(waits(site) for site in sites))
        time.sleep(self._seconds)
        self.steps = [len(site.hashes) for site in sites]
        assert self.line is not None and max(self.steps) < NUM_STEPS
        self.line.is_open = True


@pytest.mark.ci
@pytest.mark.parametrize("name", ["diloco", "recommended"])
def test_a_line_that_heals_leaves_no_trace(name: str) -> None:
    """Both halves wait, neither goes on; then both do, with the bits of an undisturbed run."""
    cut, method = Cut(), ALL_CASES[name].method(2)
    options: dict[str, Any] = {"num_steps": NUM_STEPS, "num_clusters": 2, "by_log": True}
    sites = run(
        method, **TINY, **options, before=cut.before, watch=cut.watch, line=cut.take,
        quorum_wait_seconds=WAIT,
    )  # fmt: skip
    whole = run(method, **TINY, **options)
    assert cut.steps and len(sites[0].hashes) == NUM_STEPS
    for ours, theirs in zip(sites, whole, strict=True):
        assert ours.hashes == theirs.hashes and are_equal(parameters(ours), parameters(theirs))
        assert ours.clerk is not None and ours.clerk.end is None and not waits(ours)
        assert set(ours.epochs) == {0}  # the same membership all the time


def cut_short(what: Submission) -> int | None:
    return 1 if what.step >= LAST else None


@pytest.mark.ci
def test_of_two_who_is_left_waits_and_goes_on_once_the_other_is_started_again() -> None:
    seen: list[tuple[int, ...]] = []

    def before(site: Site, step: int) -> None:
        slowly(site, step)
        if site.id == 0 and site.transport is not None:
            seen.append(site.transport.seat.ids)

    sites = run(
        ALL_CASES["diloco"].method(2), TINY["model"], TINY["compute_loss"], UNTIL_HEALED, 2,
        fates={1: cut_short}, before=before, by_log=True, again=1, quorum_wait_seconds=WAIT,
    )  # fmt: skip
    check_healed(sites)
    assert (0,) in seen and seen[-1] == (0, 1)


def test_nobody_comes_back_in_time() -> None:
    with pytest.raises(PeerPreempted, match="cluster 1 is lost .*clusters 0, 1 are left"):
        run(
            ALL_CASES["diloco"].method(2), **TINY, num_steps=NUM_STEPS, num_clusters=2,
            fates={1: cut_short}, by_log=True, quorum_wait_seconds=0.5,
        )  # fmt: skip


def force(site: Site, without: int) -> None:
    """As an operator does by `dsx ctl force-view`."""
    assert site.clerk is not None
    view = site.clerk.facts()["view"]
    order = {"without": [without], "view": view, "branch": time.time_ns(), "by": "berlin"}
    with pytest.raises(ValueError, match=f"it is for view {view + 1}; view {view} is in force"):
        site.clerk.force({**order, "view": view + 1})
    with pytest.raises(ValueError, match="and not this one"):
        site.clerk.force({**order, "without": [site.id]})
    assert site.clerk.force(order) == {"view": view}


def test_a_forced_view_has_one_go_on_alone(caplog: pytest.LogCaptureFixture) -> None:
    def watch(sites: list[Site]) -> None:
        until(lambda: waits(sites[0]))
        force(sites[0], 1)

    sites = run(
        ALL_CASES["recommended"].method(2), **TINY, num_steps=NUM_STEPS, num_clusters=2,
        fates={1: cut_short}, watch=watch, by_log=True, quorum_wait_seconds=WAIT,
    )  # fmt: skip
    assert len(sites[0].hashes) == NUM_STEPS and sites[0].members_at[NUM_STEPS] == (0,)
    assert sites[0].loop is not None
    assert sites[0].loop.history.rounds == sites[0].loop.history.launches
    assert "berlin has forced a view without cluster(s) 1, in place of view" in caplog.text


@pytest.mark.ci
def test_who_is_left_out_by_force_is_told_so_when_the_line_is_whole_again() -> None:
    cut = Cut()
    found: list[Site] = []

    def watch(sites: list[Site]) -> None:
        found.extend(sites)
        until(lambda: cut.has_been and all(waits(site) for site in sites))
        force(sites[0], 1)
        until(lambda: sites[0].transport and sites[0].transport.seat.ids == (0,))
        assert cut.line is not None
        cut.line.is_open = True

    with pytest.raises(PeerLost, match="the others have gone on without cluster 1"):
        run(
            ALL_CASES["diloco"].method(2), **TINY, num_steps=NUM_STEPS, num_clusters=2,
            by_log=True, before=cut.before, watch=watch, line=cut.take, quorum_wait_seconds=WAIT,
        )  # fmt: skip
    assert len(found[0].hashes) == NUM_STEPS and found[0].members_at[NUM_STEPS] == (0,)
    assert len(found[1].hashes) < NUM_STEPS


@pytest.mark.ci
def test_two_runs_say_so_where_they_meet(caplog: pytest.LogCaptureFixture) -> None:
    """Both have been forced to go on without the other: each says it once, and both go on."""
    cut = Cut()
    words = "is reached, and goes on in another run than this one"

    def before(site: Site, step: int) -> None:
        cut.before(site, step)
        if cut.has_been and step > LAST + 4:
            until(lambda: caplog.text.count(words) == 2)

    def watch(sites: list[Site]) -> None:
        until(lambda: cut.has_been and all(waits(site) for site in sites))
        for site in sites:
            force(site, 1 - site.id)
        until(lambda: all(s.transport and s.transport.seat.ids == (s.id,) for s in sites))
        assert cut.line is not None and words not in caplog.text
        cut.line.is_open = True

    sites = run(
        ALL_CASES["diloco"].method(2), **TINY, num_steps=NUM_STEPS, num_clusters=2,
        by_log=True, before=before, watch=watch, line=cut.take, quorum_wait_seconds=WAIT,
    )  # fmt: skip
    for site in sites:
        assert len(site.hashes) == NUM_STEPS and site.members_at[NUM_STEPS] == (site.id,)
        assert caplog.text.count(f"cluster {site.id} {words}") == 1
    assert sites[0].hashes[NUM_STEPS] != sites[1].hashes[NUM_STEPS]


def test_who_waits_for_one_that_is_lost_hears_so_once_the_run_does_not_go_on() -> None:
    """Until then that one may come back, and no deadline passes."""
    with two_links(grace_seconds=0.2) as (links, _):
        first, _ = groups_of(links)
        links[0].hold((0, 1), 0)
        work = first.recv([torch.zeros(4)], 1, 0)
        assert not work.has_failed
        links[1].close()
        until(lambda: links[0].is_lost((1, 0)))
        assert work.has_failed and links[0].process_at((1, 0)) is None
        links[0].hold_nobody()
        with pytest.raises(RuntimeError, match="closed"):
            work.wait(timedelta(seconds=60))
