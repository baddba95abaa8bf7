"""A start compares first, and sends what differs, to whom it differs; over gloo as in process."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
import torch

from dsx.comm import spread
from dsx.comm.in_process import InProcessHub, start_together
from dsx.config.schema import preset
from dsx.core.membership import Membership
from dsx.core.transport import PeerLost
from dsx.engines.torch import TorchAdapter
from dsx.outer.bit_hash import BitHash
from dsx.outer.digest import Digests
from dsx.outer.loop import OuterLoop
from dsx.outer.rounds import until_all_are_done
from tests.comm.threads import over_gloo
from tests.tiny import NUM_LAYERS, TinyNet

METHOD = preset("eager", fragments={"by": "layer", "num_fragments": NUM_LAYERS})
Clusters = Callable[[Sequence[torch.nn.Module]], list[OuterLoop]]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loop_on(model: torch.nn.Module, transport: Any) -> OuterLoop:
    return OuterLoop(METHOD, TorchAdapter(model, sgd(model), METHOD.fragments), transport)


def in_process(models: Sequence[torch.nn.Module]) -> list[OuterLoop]:
    transports = InProcessHub(Membership.of(len(models))).transports()
    loops = [loop_on(*pair) for pair in zip(models, transports, strict=True)]
    start_together(loops)
    return loops


def in_threads(models: Sequence[torch.nn.Module]) -> list[OuterLoop]:
    def start(transport: Any) -> OuterLoop:
        loop = loop_on(models[transport.seat.position], transport)
        loop.start()
        return loop

    return over_gloo(len(models), start, range(NUM_LAYERS))


def bytes_of_digests(num_clusters: int) -> int:
    """The handshake and 32 for each fragment, to each other cluster."""
    return (48 + 32 * NUM_LAYERS) * (num_clusters - 1)


@pytest.mark.parametrize("clusters", [in_process, in_threads])
@pytest.mark.parametrize("num_clusters", [2, 3])
def test_equal_weights_cost_their_digests(num_clusters: int, clusters: Clusters) -> None:
    models = [TinyNet(3) for _ in range(num_clusters)]
    for loop in clusters(models):
        begun = loop.beginning.begun
        assert begun.bytes_sent == bytes_of_digests(num_clusters) < 10_000
        assert (begun.bytes_received, begun.apart) == (0, [])
        assert not loop.beginning.is_open
    for model in models:
        for own, first in zip(model.parameters(), TinyNet(3).parameters(), strict=True):
            assert torch.equal(own, first)


@pytest.mark.parametrize("clusters", [in_process, in_threads])
def test_one_fragment_that_differs_goes_to_the_one_that_differs(
    clusters: Clusters, caplog: pytest.LogCaptureFixture
) -> None:
    models = [TinyNet(3) for _ in range(3)]
    with torch.no_grad():
        models[2].layers[1].weight[0, 0] *= -1  # pyright: ignore
    with caplog.at_level(logging.INFO):
        loops = clusters(models)
    fragments = loops[0].adapter.fragment_parameters
    (place,) = (f for f, of in enumerate(fragments) if any(p.name == "layers.1.weight" for p in of))
    numel = loops[0].adapter.fragment_numel[place]
    begun = [loop.beginning.begun for loop in loops]
    assert [one.apart for one in begun] == [[place]] * 3
    assert [one.bytes_sent - bytes_of_digests(3) for one in begun] == [4 * numel, 0, 0]
    assert [one.bytes_received for one in begun] == [0, 0, 4 * numel]
    for model, loop in zip(models, loops, strict=True):
        for own, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert torch.equal(own, first)
        for anchor, first in zip(loop.state.anchor, loops[0].state.anchor, strict=True):
            assert torch.equal(anchor, first)
        for slots, first in zip(loop.state.slots, loops[0].state.slots, strict=True):
            assert torch.equal(slots.delay["start"], first.delay["start"])
    said = f"1 of {NUM_LAYERS} fragments (fragment {place}) differ in cluster(s) 2; cluster 0's"
    assert caplog.text.count(said) == 2  # by the one that gives and the one that takes
    assert "seed all clusters alike" in caplog.text


@pytest.mark.parametrize("clusters", [in_process, in_threads])
def test_weights_that_all_differ_go_along_the_chain(clusters: Clusters) -> None:
    models = [TinyNet(seed) for seed in range(3)]
    numel = sum(p.numel() for p in models[0].parameters())
    begun = [loop.beginning.begun for loop in clusters(models)]
    assert [one.bytes_sent - bytes_of_digests(3) for one in begun] == [4 * numel, 4 * numel, 0]
    assert [one.bytes_received for one in begun] == [0, 4 * numel, 4 * numel]
    for model in models:
        for own, first in zip(model.parameters(), TinyNet(0).parameters(), strict=True):
            assert torch.equal(own, first)


def test_who_has_nothing_to_send_waits_for_those_that_send_longer_than_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cluster 2 has what cluster 0 has; its next exchange would wait for the deadline only."""
    stage, never, deadline = spread._Pieces.stage, threading.Event(), 1.0

    def slow(pieces: spread._Pieces, number: int) -> None:
        never.wait(0.4)
        stage(pieces, number)

    monkeypatch.setattr(spread._Pieces, "stage", slow)
    models = [TinyNet(seed) for seed in (0, 1, 0)]

    def start(transport: Any) -> tuple[OuterLoop, float, list[Any]]:
        began = time.monotonic()
        loop = loop_on(models[transport.seat.position], transport)
        loop.start()
        seconds = time.monotonic() - began
        return loop, seconds, list(transport.gather("after", transport.seat.position)())

    for loop, seconds, after in over_gloo(3, start, range(NUM_LAYERS), deadline_seconds=deadline):
        assert seconds > deadline and after == [0, 1, 2]
        assert len(loop.beginning.begun.apart) == NUM_LAYERS


@pytest.mark.parametrize("where", [1, 0])
def test_a_rank_that_loses_a_peer_ends_those_of_its_cluster(where: int) -> None:
    """They wait in rounds: `where` 0 is the rank that lost it, 1 another one."""

    class Ranks:
        def max_over_stages(self, values: torch.Tensor) -> torch.Tensor:
            return torch.maximum(values, torch.tensor([0.0, float(where)]))

    own: Future[None] = Future()
    if where:
        own.set_result(None)
    else:
        own.set_exception(PeerLost("fragment 0: piece 3 of 9"))
    rounds = until_all_are_done("masters", own, cast(Any, Ranks()), cast(Any, None))
    with pytest.raises(PeerLost, match="another rank of this cluster" if where else "piece 3 of 9"):
        next(rounds)


def test_what_waits_is_compared_again_when_it_is_settled() -> None:
    """Weights may be loaded meanwhile: those count, and a step before is refused."""
    models = [TinyNet(seed) for seed in range(2)]
    transports = InProcessHub(Membership.of(2)).transports()
    loops = [loop_on(*pair) for pair in zip(models, transports, strict=True)]
    for _ in zip(*(loop.starting(waits=True) for loop in loops), strict=True):
        pass
    for loop in loops:
        assert loop.beginning.is_open and loop.beginning.begun.bytes_received == 0
        with pytest.raises(RuntimeError, match="weights still differ"):
            loop.after_inner_step()
    models[0].load_state_dict(TinyNet(7).state_dict())
    for _ in zip(*(loop.beginning.taking() for loop in loops), strict=True):
        pass
    for model, loop in zip(models, loops, strict=True):
        assert not loop.beginning.is_open
        for own, first in zip(model.parameters(), TinyNet(7).parameters(), strict=True):
            assert torch.equal(own, first)
        for anchor, first in zip(loop.state.anchor, loops[0].state.anchor, strict=True):
            assert torch.equal(anchor, first) and anchor.any()
        assert loop.history.step == 0


def test_two_signs_may_cancel_in_the_hash_of_headers_but_not_in_a_digest() -> None:
    x = torch.ones(100)
    y = x.clone()
    y[[1, 3]] *= -1
    assert int(BitHash().of(x)) == int(BitHash().of(y))
    with Digests() as digests:
        assert not torch.equal(digests.of(x), digests.of(y))


@pytest.mark.parametrize("numel", [0, 1, 1000, 1001])
def test_every_bit_and_the_length_count(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsx.outer.digest._PIECE", 10)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(numel))
    with Digests() as digests:
        own = digests.of(x)
        assert torch.equal(own, digests.of(x.clone()))
        assert not torch.equal(own, digests.of(torch.cat([x, torch.zeros(1)])))
        for place in range(0, numel, 111):
            y = x.clone()
            y.view(torch.int32)[place] ^= 1
            assert not torch.equal(own, digests.of(y))
