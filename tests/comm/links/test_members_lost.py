"""A cluster is lost in the middle of a round: those who are left go on, and lose no round."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from dsx.config.schema import preset
from dsx.core.transport import PeerLost, Submission
from dsx.method.method import Method
from tests.comm.links.fates import BUT_ONE
from tests.comm.links.sites import Site, members, run
from tests.compress.test_over_gloo import WideNet, loss
from tests.tiny import ALL_CASES, TinyNet, mean_loss

TINY: dict[str, Any] = {"model": TinyNet(), "compute_loss": mean_loss}
WIDE: dict[str, Any] = {"model": WideNet(), "compute_loss": loss}
NUM_STEPS, LAST = 24, 10  # the launch of no earlier step than that is cut short
ROUNDS = [0, 1, BUT_ONE]
QUICK = ("diloco", "recommended")
IN_CI = ("streaming_diloco", "cocodc", "eager", "dilocox", "co2", "dreamddp", "overlap_local_sgd")
CARRIED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.ci if name in IN_CI else
                 pytest.mark.slow) for name in ALL_CASES
]  # fmt: skip
SHIFT = {"delay": {"type": "shift", "steps": 2}, "schedule": {"interval": 4}}
EAGER = {"schedule": {"interval": 4}}
TWO_BITS = {"type": "quantized", "wire": "2bit", "mean_wire": "2bit"}
CODES: dict[str, tuple[str, dict[str, Any]]] = {  # made at a launch, before it is known for whom
    "recommended": ("recommended", {"schedule": {"interval": 4}, "delay": {"steps": 2}}),
    "shift, a round late": ("recommended", {
        "schedule": {"interval": 4}, "delay": {"outer_steps": 1, "steps": 0},
    }),
    "random_top_k": ("diloco", SHIFT | {
        "compression": {
            "type": "random_top_k", "random_ratio": 0.5, "chunk": 256, "error_feedback": "none",
        },
    }),
    "eager_fp4": ("eager_fp4", EAGER),
    "eager, 2bit": ("eager", EAGER | {"compression": TWO_BITS | {"error_feedback": "fp32"}}),
    "eager, noise": ("eager", EAGER | {
        "compression": {"type": "quantized", "rounding": "stochastic", "error_feedback": "bf16"},
    }),
    "eager, top_k": ("eager", EAGER | {"compression": {"type": "top_k", "k": 32, "chunk": 1024}}),
}  # fmt: skip
OFTEN = [("recommended", 3), ("recommended", 4)]
CODED = [
    pytest.param(name, count, marks=() if (name, count) in OFTEN else pytest.mark.ci)
    for name in CODES for count in (3, 4, 5)
]  # fmt: skip


def coded(name: str, num_clusters: int) -> Method:
    """A method that encodes at a launch: of more than three clusters, with means by owners."""
    of, overrides = CODES[name]
    method = preset(of, num_clusters, **overrides)
    assert method.encodes_at_launch
    return method


def tell_the_rest(sites: list[Site]) -> None:
    """Take the place of the log: once one has ended, the others are the members."""
    victim = sites[-1]
    assert victim.is_over.wait(60)
    for site in sites[:-1]:
        site.views.put(members(1, [s.id for s in sites[:-1]], len(sites)))


def lose(method: Any, rounds: int, num_clusters: int = 3, **model: Any) -> list[Site]:
    """Kill the last one in its first launch of a step from LAST on, after so many rounds."""

    def fate(what: Submission) -> int | None:
        return rounds if what.step >= LAST else None

    return run(
        method, num_steps=NUM_STEPS, num_clusters=num_clusters, fates={num_clusters - 1: fate},
        watch=tell_the_rest, **(model or TINY),
    )  # fmt: skip


def leave(method: Any, launch: int, num_clusters: int = 3, **model: Any) -> list[Site]:
    """Let the last one go between two steps: before the first of those of that step."""
    meeting = threading.Barrier(num_clusters)

    def before(site: Site, step: int) -> None:
        if step != launch:
            return
        assert site.transport is not None
        site.await_commits(site.transport._under_way.last + 1)
        meeting.wait(20)
        if site.id == num_clusters - 1:
            site.end()
            raise PeerLost("it has left")
        site.views.put(members(1, range(num_clusters - 1), num_clusters))
        until = time.monotonic() + 20
        while site.transport.seat.membership.epoch != 1 or not site.transport.is_settled:
            assert time.monotonic() < until
            time.sleep(0.01)

    return run(
        method, num_steps=NUM_STEPS, num_clusters=num_clusters, before=before, **(model or TINY)
    )


def anchors(site: Site) -> list[torch.Tensor]:
    assert site.loop is not None
    return [anchor.clone() for anchor in site.loop.state.anchor]


def parameters(site: Site) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in site.model.parameters()]


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check(sites: list[Site], epoch: int = 1, left: int = 2) -> None:
    """So many are left, and hold the same; no round was left out."""
    first = sites[0].loop
    assert first is not None and first.totals.refused == 0
    assert first.history.rounds == first.history.launches
    for site in sites[:left]:
        assert site.loop is not None and site.loop.history == first.history
        assert are_equal(anchors(sites[0]), anchors(site))
        assert site.epochs[-1] == epoch


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("name", CARRIED)
def test_those_who_are_left_go_on_and_hold_the_same(name: str, rounds: int) -> None:
    sites = lose(ALL_CASES[name].method(3), rounds)
    assert sites[2].is_over.is_set()
    check(sites)


@pytest.mark.parametrize("name", CARRIED)
def test_a_redo_has_the_bits_of_a_run_in_which_that_cluster_took_no_part(name: str) -> None:
    """All that the lost one has a part in is what was committed before."""
    method = ALL_CASES[name].method(3)
    cut = lose(method, 1)
    left = leave(method, cut[2].cut_at)
    check(left)
    for mine, other in zip(cut[:2], left[:2], strict=True):
        assert are_equal(parameters(mine), parameters(other))
        assert are_equal(anchors(mine), anchors(other))


@pytest.mark.parametrize(("name", "num_clusters"), CODED)
def test_codes_of_a_launch_go_to_those_who_are_left(name: str, num_clusters: int) -> None:
    """As they were made; with the bits of a run in which that cluster took no part."""
    method, left = coded(name, num_clusters), num_clusters - 1
    cut = lose(method, 1, num_clusters, **WIDE)
    check(cut, left=left)
    gone = leave(method, cut[left].cut_at, num_clusters, **WIDE)
    check(gone, left=left)
    for mine, other in zip(cut[:left], gone[:left], strict=True):
        assert are_equal(parameters(mine), parameters(other))
        assert are_equal(anchors(mine), anchors(other))


def test_one_after_another_may_be_lost_and_one_while_the_others_agree() -> None:
    """Of four; the third ends while the others wait for it, to hear what it has committed."""

    def fate(what: Submission) -> int | None:
        return 1 if what.step >= LAST else None

    def tell(sites: list[Site]) -> None:
        assert sites[3].is_over.wait(60)
        for site in sites[:2]:
            site.views.put(members(1, [0, 1, 2], 4))
        time.sleep(0.3)
        sites[2].end()
        time.sleep(0.5)
        for site in sites[:2]:
            site.views.put(members(2, [0, 1], 4))

    sites = run(coded("recommended", 4), WideNet(), loss, NUM_STEPS, 4, {3: fate}, watch=tell)
    check(sites, epoch=2)


def test_a_view_that_another_one_never_heard_of_is_left_for_the_next() -> None:
    """Two views in a row: one of two knows the first, and does not wait for the other in it."""

    def tell(sites: list[Site]) -> None:
        assert sites[2].is_over.wait(60)
        sites[0].views.put(members(1, [0, 1]))
        time.sleep(0.5)
        for site in sites[:2]:
            site.views.put(members(2, [0, 1]))

    def fate(what: Submission) -> int | None:
        return BUT_ONE if what.step >= LAST else None

    method = ALL_CASES["diloco_delayed"].method(3)
    began = time.monotonic()
    sites = run(method, TinyNet(), mean_loss, NUM_STEPS, fates={2: fate}, watch=tell)
    assert time.monotonic() - began < 15  # no deadline has passed
    check(sites, epoch=2)


def test_who_is_left_out_is_told_so() -> None:
    """Its own part of a cut line does not go on."""

    def tell(sites: list[Site]) -> None:
        assert sites[2].is_over.wait(60)
        sites[0].views.put(members(1, [1]))
        sites[1].views.put(members(1, [1]))

    def fate(what: Submission) -> int | None:
        return 1 if what.step >= LAST else None

    method = ALL_CASES["diloco"].method(3)
    with pytest.raises(PeerLost, match=r"have gone on without cluster 0 \(view 1: cluster 1\)"):
        run(method, TinyNet(), mean_loss, NUM_STEPS, fates={2: fate}, watch=tell)


def test_what_three_and_then_two_do_is_that_of_plain_torch() -> None:
    """DiLoCo with Nesterov: rounds to LAST are means of three, the others of two."""
    method = ALL_CASES["diloco"].method(3)
    sites = lose(method, 1)
    rate, momentum = method.outer_optimizer.lr, method.outer_optimizer.momentum  # pyright: ignore
    models = [TinyNet() for _ in range(3)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in models]
    anchor = [p.detach().clone() for p in models[0].parameters()]
    velocity = [torch.zeros_like(p) for p in anchor]
    for step in range(1, NUM_STEPS + 1):
        for m, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            mean_loss(model, m, step).backward()
            optimizer.step()
        if step % method.schedule.interval:
            continue
        here = models if step < LAST else models[:2]
        with torch.no_grad():
            for i, (a, v) in enumerate(zip(anchor, velocity, strict=True)):
                own = [a - [*model.parameters()][i] for model in here]
                gradient = sum(own[1:], own[0]) / len(own)
                v.mul_(momentum).add_(gradient)
                a.sub_(rate * (gradient + momentum * v))
                for model in models:
                    [*model.parameters()][i].copy_(a)
    for expected, found in zip(anchor, parameters(sites[0]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
