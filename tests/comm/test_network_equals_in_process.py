"""Real processes over gloo, and over links, give the numbers of one process, to the bit."""

from __future__ import annotations

import re
import time
from typing import Any

import numpy as np
import pytest
import torch

import dsx
from dsx.comm.links.transport import LinkTransport
from dsx.compress.averaging import ExactMean
from dsx.core.membership import Seat
from dsx.core.transport import Submission
from dsx.core.types import Stage
from tests.distributed import run_distributed
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, CASES, TinyNet, mean_loss

NUM_STEPS = 15
NUM_MORE = 5  # behind finish()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def block(name: str, num_clusters: int, **more: Any) -> dict[str, Any]:
    clusters = {"num_clusters": num_clusters, "deadline_seconds": 20}
    case = ALL_CASES[name]
    return {"dsx": {"preset": case.preset, "clusters": clusters, **case.overrides, **more}}


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    cluster: int,
    num_steps: int,
    first: int = 1,
) -> None:
    for step in range(first, first + num_steps):
        optimizer.zero_grad()
        mean_loss(model, cluster, step).backward()
        optimizer.step()


PRESETS = [*CASES]
FIRST, SECOND = PRESETS[::2], PRESETS[1::2]  # by default each over one of the two
COMBINATIONS = [name for name in ALL_CASES if name not in CASES]


def train_each(names: list[str], num_clusters: int, link: dict[str, Any]) -> dict[str, Any]:
    world = dsx.init_distributed(block("diloco", num_clusters, link=link))
    results: dict[str, Any] = {}
    for name in names:
        model = TinyNet(seed=world.cluster_id)  # only cluster 0's start counts
        optimizer = adamw(model)
        handle = dsx.attach(model, optimizer, config=block(name, num_clusters, link=link))
        assert isinstance(handle.loop.transport, LinkTransport) == ("transport" in link)
        train(model, optimizer, world.cluster_id, NUM_STEPS)
        results[name] = {
            "parameters": {n: p.detach().clone().numpy() for n, p in model.named_parameters()},
            "anchors": [a.clone().numpy() for a in handle.loop.state.anchor],
            "bytes_sent": handle.totals.bytes_sent,
            "gathered": handle.gather({"cluster": world.cluster_id}),
        }
        handle.finish()
        results[name]["drained"] = copies(model)
        results[name]["drained_anchors"] = [a.clone().numpy() for a in handle.loop.state.anchor]
        with handle.averaged():
            results[name]["averaged"] = copies(model)
        results[name]["restored"] = copies(model)
        train(model, optimizer, world.cluster_id, NUM_MORE, NUM_STEPS + 1)
        results[name]["gone on"] = {n: p.detach().numpy() for n, p in model.named_parameters()}
        handle.close()
    return results


def copies(model: torch.nn.Module) -> list[Any]:
    return [p.detach().clone().numpy() for p in model.parameters()]


def check_export(clusters: list[dict[str, Any]], name: str) -> None:
    """The mean of the drained parameters, or the drained anchor where that is the model."""
    for cluster in clusters:
        pairs = zip(cluster["drained"], cluster["restored"], strict=True)
        assert all((a == b).all() for a, b in pairs)
        flat = np.concatenate([p.reshape(-1) for p in cluster["averaged"]])
        if ALL_CASES[name].method().delay.export == "mean":
            drained = zip(*(c["drained"] for c in clusters), strict=True)
            expected = np.concatenate([np.mean(p, axis=0).reshape(-1) for p in drained])
            assert np.abs(flat - expected).max() < 1e-6
            pair = (cluster["averaged"], cluster["drained"])
            assert any((a != b).any() for a, b in zip(*pair, strict=True))
        else:
            anchors = np.concatenate(cluster["drained_anchors"])  # in the order of fragments
            assert (np.sort(flat) == np.sort(anchors)).all()


LINK = {"transport": "link"}


@pytest.mark.parametrize(
    ("names", "num_clusters", "link"),
    [
        pytest.param(FIRST, 2, {}, id="presets"),
        pytest.param(SECOND, 2, LINK, id="presets over links"),
        pytest.param(SECOND, 2, {}, marks=pytest.mark.ci, id="other presets"),
        pytest.param(FIRST, 2, LINK, marks=pytest.mark.ci, id="other presets over links"),
        pytest.param(COMBINATIONS, 2, {}, marks=pytest.mark.ci, id="combinations"),
        pytest.param(COMBINATIONS, 2, LINK, marks=pytest.mark.ci, id="combinations over links"),
        pytest.param(PRESETS, 3, {}, marks=pytest.mark.ci, id="presets with three clusters"),
        pytest.param(PRESETS, 3, LINK, marks=pytest.mark.ci, id="three clusters over links"),
    ],
)
def test_each_is_that_of_one_process(
    names: list[str], num_clusters: int, link: dict[str, Any]
) -> None:
    more = (names, num_clusters, link)
    results = run_distributed(train_each, num_clusters, *more, timeout_seconds=120)
    for name in names:
        method = ALL_CASES[name].method(num_clusters)
        run = Simulated(TinyNet(), adamw, method, num_clusters)
        for _ in range(NUM_STEPS):
            run.train_step(mean_loss)
        for cluster, expected in enumerate(run.parameters()):
            got = results[cluster][name]
            for key, value in expected.items():
                assert torch.equal(torch.from_numpy(got["parameters"][key]), value), (name, key)
            anchors = zip(got["anchors"], run.loops[0].state.anchor, strict=True)
            assert all(torch.equal(torch.from_numpy(a), b) for a, b in anchors)
            assert got["bytes_sent"] == run.loops[cluster].totals.bytes_sent
            assert got["gathered"] == [{"cluster": m} for m in range(num_clusters)]
        check_export([result[name] for result in results], name)
        run.finish()
        for _ in range(NUM_MORE):
            run.train_step(mean_loss)
        for cluster, expected in enumerate(run.parameters()):
            got = results[cluster][name]["gone on"]
            assert all(torch.equal(torch.from_numpy(got[n]), p) for n, p in expected.items()), name


def fail_alone(cluster_that_differs: str) -> str:
    """Attach with a difference in cluster 1 and return the error's text."""
    config = block("diloco", 2)
    world = dsx.init_distributed(config)
    model: torch.nn.Module = TinyNet()
    if world.cluster_id == 1:
        if cluster_that_differs == "interval":
            config = block("diloco", 2, schedule={"interval": 8})
        elif cluster_that_differs == "shape":
            model.layers[2] = torch.nn.Linear(6, 6, bias=False)  # type: ignore[index]
    try:
        dsx.attach(model, adamw(model), config=config)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("interval", ["dsx.schedule.interval", "cluster 0 has 4", "cluster 1 has 8"]),
        ("shape", ["fragments", "cluster 0 has", "cluster 1 has", "layers.2.bias"]),
    ],
)
def test_a_mismatch_names_both_sides_and_what_differs(difference: str, named: list[str]) -> None:
    for message in run_distributed(fail_alone, 2, difference):
        for part in named:
            assert part in message, message


def lose_a_peer() -> tuple[str, str]:
    world = dsx.init_distributed(block("diloco", 2))
    model = TinyNet()
    of_stage = world.connect([2], Stage(1, 2))
    optimizer = adamw(model)
    dsx.attach(model, optimizer, config=block("diloco", 2))
    if world.cluster_id == 1:
        return "left", ""  # the process ends before the first sync
    errors: list[str] = []
    exchange = ExactMean(Seat.of(0, 2)).exchange(torch.zeros(3))
    for wait in (
        lambda: train(model, optimizer, 0, 8),
        lambda: of_stage.submit(Submission(2, 4), exchange).wait(),
    ):
        with pytest.raises(dsx.PeerLost) as caught:
            wait()
        errors.append(str(caught.value))
    return errors[0], errors[1]


def test_a_lost_peer_is_named_with_fragment_and_step() -> None:
    message, of_stage = run_distributed(lose_a_peer, 2, ends_together=False)[0]
    assert of_stage.startswith("fragment 2 of pipeline stage 1 launched at step 4: cluster 1 ")
    assert message.startswith("fragment 0 launched at step 4: cluster 1 closed its connection")
    assert message.endswith("last checkpoint: none saved")


def wait_for_a_silent_peer() -> tuple[str, float]:
    import time

    config = block("diloco", 2)
    config["dsx"]["clusters"]["deadline_seconds"] = 1.0
    world = dsx.init_distributed(config)
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=config)
    started = time.monotonic()
    if world.cluster_id == 1:
        world.rendezvous.group_store("silence").wait(["end"])
        return "", 0.0
    try:
        train(model, optimizer, 0, 8)
    except dsx.PeerLost as error:
        seconds = time.monotonic() - started
        world.rendezvous.group_store("silence").set("end", "1")
        handle.gather  # noqa: B018 - the handle stays alive to here
        return str(error), seconds
    return "no error", 0.0


def test_a_silent_peer_ends_in_the_deadline() -> None:
    message, seconds = run_distributed(wait_for_a_silent_peer, 2)[0]
    assert "fragment 0 launched at step 4: cluster 1 did not answer within 1 s" in message
    assert "clusters.deadline_seconds" in message
    assert seconds < 5


def finish_after(steps: list[int]) -> str:
    config = block("diloco", 2)
    world = dsx.init_distributed(config)
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=config)
    try:
        train(model, optimizer, world.cluster_id, steps[world.cluster_id])
        handle.finish()
    except ValueError as error:
        return str(error)
    return "finished"


@pytest.mark.parametrize(
    ("steps", "said"), [([5, 5], "finished"), ([6, 5], "(cluster 0: 6, cluster 1: 5)")]
)
def test_the_end_of_training_is_agreed(steps: list[int], said: str) -> None:
    for message in run_distributed(finish_after, 2, steps):
        assert said in message


STOPS = [("diloco", 0), ("streaming_diloco", 7), ("eager", 10), ("cocodc", 11)]


def stop_when_asked() -> list[tuple[int, int]]:
    """Rank 0 of cluster 1 asks for a stop at a step; return the steps it comes at, and H."""
    world = dsx.init_distributed(block("diloco", 2))
    stopped: list[tuple[int, int]] = []
    for name, asked_at in STOPS:
        model = TinyNet()
        optimizer = adamw(model)
        handle = dsx.attach(model, optimizer, config=block(name, 2))
        while not handle.should_stop():
            assert handle.step < 200
            if handle.step == asked_at and world.cluster_id == 1:
                handle.request_stop("its hour is over")
            train(model, optimizer, world.cluster_id, 1)
            if world.cluster_id == 1:
                time.sleep(0.01)  # the other one runs ahead as far as it can
        handle.finish()
        stopped.append((handle.step, handle.method.schedule.interval))
    return stopped


def test_a_stop_is_agreed() -> None:
    first, second = run_distributed(stop_when_asked, 2)
    assert first == second
    for (step, interval), (_, asked_at) in zip(first, STOPS, strict=True):
        assert asked_at < step <= asked_at + 5 * interval


def decode_wrong_bits(times: int) -> tuple[Any, Any, dict[str, Any], int]:
    """Cluster 1 decodes one bit of the last mean differently, so often."""
    world = dsx.init_distributed(block("diloco", 2))
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=block("diloco", 2))
    interval = handle.method.schedule.interval
    events: list[Any] = []
    handle.loop._on_sync = events.append
    train(model, optimizer, world.cluster_id, 2 * interval - 1)
    if world.cluster_id == 1:
        corrupt_means(handle.loop.state.channels[0].codec, times)
    train(model, optimizer, world.cluster_id, 1)
    anchor = handle.loop.state.anchor[0].clone()
    handle.finish()
    parameters = [p.detach().numpy() for p in model.parameters()]
    told = {key: events[-1].get(key) for key in ("uncommitted_by", "commit_seconds")}
    return anchor.numpy(), parameters, told, handle.totals.bytes_sent


def corrupt_means(codec: Any, times: int) -> None:
    exchange, left = codec.exchange, times

    def corrupted(x: torch.Tensor, launch: Any) -> Any:
        nonlocal left
        mean = yield from exchange(x, launch)
        if left:
            mean.view(torch.int32)[3] ^= 1 << 20
            left -= 1
        return mean

    codec.exchange = corrupted


def test_a_mean_is_applied_once_all_hold_the_same() -> None:
    """Averaged again where they do not; left out where that does not help."""
    undisturbed, again, left_out = (
        run_distributed(decode_wrong_bits, 2, times) for times in (0, 1, 2)
    )
    numel = sum(p.size for p in undisturbed[0][1])
    rounds = 2 * (4 * numel + 48 + 8) + 48  # handshakes, commits, and the last comparison
    for clusters, sent in ((undisturbed, rounds), (again, rounds + 4 * numel + 8)):
        for own in clusters:
            assert (own[0] == undisturbed[0][0]).all() and own[3] == sent
            assert all((a == b).all() for a, b in zip(own[1], undisturbed[0][1], strict=True))
            assert own[2]["uncommitted_by"] is None and own[2]["commit_seconds"] > 0
    (first, *_), (second, *_) = left_out
    assert (first == second).all() and (first != undisturbed[0][0]).any()
    assert [own[2]["uncommitted_by"] for own in left_out] == [[1], [1]]


def skip_in_one_cluster() -> list[tuple[int, bool]]:
    """Cluster 1 skips step 2, as a GradScaler would; return its launches from step 3 on."""
    world = dsx.init_distributed(block("dreamddp", 2))
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=block("dreamddp", 2))
    launches: list[tuple[int, bool]] = []
    launch = handle.loop._launch

    def noted(fragment: int, step: int, is_in_backward: bool = False, shared_by: int = 1) -> None:
        launches.append((step, is_in_backward))
        launch(fragment, step, is_in_backward, shared_by)

    handle.loop._launch = noted  # type: ignore[method-assign]
    for step in range(1, 7):
        optimizer.zero_grad()
        mean_loss(model, world.cluster_id, step).backward()
        if world.cluster_id == 1 and step == 2:
            handle.skip_inner_step()
        else:
            optimizer.step()
    handle.finish()
    return launches


def test_a_skipped_step_leaves_the_next_backward_watched() -> None:
    for launches in run_distributed(skip_in_one_cluster, 2):
        assert len(launches) == 20  # two periods of 10
        assert all(is_in_backward for _, is_in_backward in launches)


def launch_out_of_step() -> str:
    world = dsx.init_distributed(block("diloco", 2))
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=block("diloco", 2))
    if world.cluster_id == 1:
        handle.loop.history.step = 4  # as if four steps had been counted that were not taken
    try:
        train(model, optimizer, world.cluster_id, 4)
    except dsx.PeerLost as error:
        return str(error)
    return "no error"


def test_clusters_that_have_lost_step_are_told_what_each_launches() -> None:
    first, second = run_distributed(launch_out_of_step, 2)
    assert "fragment 0 launched at step 4, but cluster 1 has fragment 0 launched at step 5" in first
    assert (
        "fragment 0 launched at step 5, but cluster 0 has fragment 0 launched at step 4" in second
    )


def choose_differently() -> tuple[str, float]:
    """Cluster 1 believes another fragment to change fastest."""
    import time

    config = block("cocodc", 2)
    link = {"step_seconds": 1.0, "transfer_seconds": 1.0, "gamma": 1.0}
    config["dsx"]["schedule"] = {"interval": 20, **link}
    world = dsx.init_distributed(config)
    model = TinyNet()
    optimizer = adamw(model)
    handle = dsx.attach(model, optimizer, config=config)
    train(model, optimizer, world.cluster_id, 24)
    history = handle.loop.history
    rates = [norm / i for norm, i in zip(history.mean_norm, history.intervals, strict=True)]
    slowest = min((p for p in range(3) if not history.under_way[p]), key=lambda p: rates[p])
    if world.cluster_id == 1:
        history.mean_norm[slowest] = 1e9
    started = time.monotonic()
    try:
        train(model, optimizer, world.cluster_id, 6)
    except dsx.PeerLost as error:
        return str(error), time.monotonic() - started
    return "no error", 0.0


def test_clusters_that_choose_different_fragments_are_told_at_once() -> None:
    """Their transfers run on different groups: without a word before, both would wait in vain."""
    (first, seconds), (second, _) = run_distributed(choose_differently, 2)
    for message, other in ((first, 1), (second, 0)):
        own = re.match(r"fragment (\d) launched at step (\d+), but cluster (\d) has", message)
        assert own is not None, message
        theirs = re.search(r"has fragment (\d) launched at step (\d+): the clusters have", message)
        assert theirs is not None, message
        assert own[3] == str(other)
        assert own[1] != theirs[1] and own[2] == theirs[2]
    assert seconds < 5  # of a deadline of 20
