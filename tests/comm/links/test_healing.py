"""A cluster that was lost joins those who go on: it ends with what they hold, and nobody waits."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dsx.core.transport import PeerLost, Submission
from dsx.core.units import format_bytes
from dsx.outer import healing as healing_module
from dsx.outer import parcel
from dsx.outer.return_refusal import why_not
from tests.comm.links.sites import Site, run
from tests.comm.links.test_members_lost import LAST, TINY, coded
from tests.compress.test_over_gloo import WideNet, loss
from tests.tiny import ALL_CASES, TinyNet, mean_loss

NUM_STEPS = 160


def cut_short(what: Submission) -> int | None:
    return 1 if what.step >= LAST else None


def slowly(site: Site, step: int) -> None:
    """Until the one that has come back has trained for a while."""
    time.sleep(0.02)


def check(sites: list[Site], least_steps: int = 20) -> None:
    """All hold the same anchors at each step that the last one has taken, and at the end."""
    *others, joiner = sites
    survivors = [site for site in others if not site.is_over.is_set()]
    assert len(joiner.hashes) >= least_steps
    for step, held in joiner.hashes.items():
        assert [site.hashes[step] for site in survivors] == [held] * len(survivors), step
    assert joiner.loop is not None
    for site in survivors:
        assert site.loop is not None and site.loop.history == joiner.loop.history
        assert site.loop.totals.refused == 0
        everyone = tuple(sorted({site.id for site in sites}))
        assert site.members_at[NUM_STEPS] == joiner.members_at[NUM_STEPS] == everyone


HEALED = [name for name, case in ALL_CASES.items() if not why_not(case.method(3))]
REFUSED = [name for name in ALL_CASES if name not in HEALED]
QUICK = ("recommended",)  # and "diloco", of which more is looked at below
IN_CI = ("streaming_diloco", "eager_2", "dilocox", "co2", "overlap_local_sgd")
CASES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.ci if name in IN_CI else
                 pytest.mark.slow) for name in HEALED if name != "diloco"
]  # fmt: skip


def lose_and_heal(name: str, **options: Any) -> list[Site]:
    before = options.pop("before", slowly)
    return run(
        ALL_CASES[name].method(3), TINY["model"], TINY["compute_loss"], NUM_STEPS,
        fates={2: cut_short}, before=before, by_log=True, again=2, **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_cluster_that_is_started_again_joins_those_who_go_on(name: str) -> None:
    check(lose_and_heal(name))


class PartlyUnused(TinyNet):
    """A part of it has no gradient, so no outer step moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.arange(4000.0))


@pytest.mark.ci
def test_what_its_own_checkpoint_holds_alike_is_not_fetched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of it is of another round: that is fetched, and the rest is not."""
    monkeypatch.setattr(parcel, "LEAST_SLICE_BYTES", 1000)
    monkeypatch.setattr(healing_module, "_TELL_SECONDS", 0.0)
    fetched: dict[bool, int] = {}
    for has_saved in (False, True):
        sites = run(
            ALL_CASES["diloco"].method(3), PartlyUnused(), mean_loss, NUM_STEPS,
            fates={2: cut_short}, before=slowly, by_log=True, again=2, has_saved=has_saved,
        )  # fmt: skip
        check(sites)
        healing = sites[-1].healing
        assert healing is not None
        fetched[has_saved] = healing.copied_bytes
        assert healing.results_bytes > 0
        assert bool(healing.held_bytes) == has_saved
    unused = 4 * 4000  # of which a slice lies across its end, or two
    assert unused <= fetched[False] - fetched[True] + 2 * 1000 <= 3 * unused
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("healing: ")]
    whole = format_bytes(fetched[False])
    copying = re.compile(rf"of {whole} copied \((\d+) %\), step \d+$")
    shares = [int(match[1]) for one in told if (match := copying.search(one))]
    assert len(shares) > 5 and max(shares) > 80 and max(shares) <= 100
    assert any(re.search(rf": {whole} copied, .*B of results since, step \d+$", o) for o in told)


@pytest.mark.ci
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_joined_says_so_and_goes_on(name: str) -> None:
    sites: list[Site] = []

    def watch(found: list[Site]) -> None:
        sites.extend(found)

    with pytest.raises(PeerLost, match=r"cluster 0 takes nobody in: .*(outer parameters|rate)"):
        run(
            ALL_CASES[name].method(3), TINY["model"], TINY["compute_loss"], NUM_STEPS,
            fates={2: cut_short}, before=slowly, watch=watch, by_log=True, again=2,
        )  # fmt: skip
    for site in sites[:2]:
        assert site.loop is not None and site.loop.history.step == NUM_STEPS
        assert site.members_at[NUM_STEPS] == (0, 1)


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + 120  # a bound, on a busy host, too
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def survivors_agree(sites: list[Site]) -> None:
    """The two who were never lost hold the same at every step, and have left no round out."""
    first, second = sites[0], sites[1]
    assert first.hashes == second.hashes and len(first.hashes) == NUM_STEPS
    assert first.loop is not None and second.loop is not None
    assert first.loop.history == second.loop.history and first.loop.totals.refused == 0


def test_who_is_back_contributes() -> None:
    """Its part is in the means, and its gradients are not those of the anchor."""
    sites = lose_and_heal("diloco")
    check(sites)
    for site in (sites[0], sites[3]):
        assert site.loop is not None
        last = site.loop.last_applied[0]
        assert last.buffers.parity.ids == [0, 1, 2] and not last.buffers.parity.idle_in
        told = {id: square for id, square in last.buffers.parity.squares}
        assert min(told.values()) > 0
    longest = max(sites[0].waits.values())
    assert longest < 5.0  # by no deadline: of them all have 20 s


def test_a_slice_that_was_changed_on_its_way_is_taken_from_another(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parcel, "LEAST_SLICE_BYTES", 64)  # so that all sources are asked

    def watch(sites: list[Site]) -> None:
        wait_until(lambda: sites[1].donor is not None)
        donor = sites[1].donor
        assert donor is not None
        rightly = donor.serve

        def serve(asker: Any, body: bytes, answer: Any) -> None:
            def changed(text: bytes) -> None:
                is_slice = body[1:].startswith(b'["slice"') and len(text) > 9
                answer(text[:-1] + bytes([text[-1] ^ 1]) if is_slice else text)

            rightly(asker, body, changed)

        donor.serve = serve

    check(lose_and_heal("streaming_diloco", watch=watch))
    assert "cluster 1 has sent a slice that is not what its hash says" in caplog.text


@pytest.mark.ci
def test_who_is_too_far_behind_begins_anew(caplog: pytest.LogCaptureFixture) -> None:
    def watch(sites: list[Site]) -> None:
        wait_until(lambda: sites[1].donor is not None and sites[0].donor is not None)
        for site in sites[:2]:
            assert site.donor is not None
            site.donor.most_bytes = -1
        wait_until(lambda: "heal too slowly: more than 8 rounds behind" in caplog.text)
        for site in sites[:2]:
            assert site.donor is not None
            site.donor.most_bytes = 1 << 30

    check(lose_and_heal("diloco_delayed", watch=watch))
    assert "healing begins anew (1 of 6)" in caplog.text


@pytest.mark.ci
def test_who_is_lost_again_while_it_heals_costs_the_others_nothing() -> None:
    is_lost = threading.Event()

    def watch(sites: list[Site]) -> None:
        wait_until(lambda: len(sites) == 4 and sites[3].loop is not None)
        time.sleep(0.7)
        sites[3].end()
        is_lost.set()

    def before(site: Site, step: int) -> None:
        slowly(site, step)
        if step == NUM_STEPS - 40:  # however long it took to come back
            wait_until(is_lost.is_set)

    sites = lose_and_heal("streaming_diloco", watch=watch, before=before)
    survivors_agree(sites)
    assert sites[0].members_at[NUM_STEPS] == (0, 1)


@pytest.mark.ci
@pytest.mark.parametrize("steps", [0, 1, 9])
def test_who_is_lost_again_after_it_has_come_back_leaves_the_others_as_before(steps: int) -> None:
    """At once, while launches of before are under way, and later."""

    def before(site: Site, step: int) -> None:
        slowly(site, step)
        if site.healing is not None and len(site.hashes) == steps:
            site.end()
            raise PeerLost("it has been killed again")

    sites = lose_and_heal("eager_2", before=before)
    survivors_agree(sites)
    assert len(sites[3].hashes) == steps and sites[0].members_at[NUM_STEPS] == (0, 1)
    for step, held in sites[3].hashes.items():
        assert sites[0].hashes[step] == held


@pytest.mark.ci
@pytest.mark.parametrize("name", ["diloco", "recommended"])
def test_of_two_the_other_one_joins_the_arbiter(name: str) -> None:
    sites = run(
        ALL_CASES[name].method(2), TINY["model"], TINY["compute_loss"], NUM_STEPS, 2,
        fates={1: cut_short}, before=slowly, by_log=True, arbiter=0, again=1,
    )  # fmt: skip
    check(sites)


@pytest.mark.ci
def test_the_first_one_which_has_led_the_log_joins_those_who_have_gone_on() -> None:
    sites = run(
        ALL_CASES["streaming_diloco"].method(3), TINY["model"], TINY["compute_loss"], NUM_STEPS,
        fates={0: cut_short}, before=slowly, by_log=True, again=0,
    )  # fmt: skip
    check(sites)


@pytest.mark.ci
def test_of_four_with_means_by_owners_the_last_one_joins() -> None:
    """Residuals of means start from zero at both changes."""
    sites = run(
        coded("recommended", 4), WideNet(), loss, NUM_STEPS, 4, fates={3: cut_short},
        before=slowly, by_log=True, again=3,
    )  # fmt: skip
    check(sites)
