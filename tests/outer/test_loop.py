"""The loop in process: equal to the reference, and the identities between methods."""

from __future__ import annotations

import pytest
import torch

from dsx.config.schema import preset
from dsx.core.exchange import COMMIT_BYTES, HEADER_BYTES
from dsx.core.membership import Membership
from dsx.outer.recovery import NonFiniteError
from dsx.outer.transfer import Transfer
from tests.simulated import Simulated
from tests.tiny import CASES, TinyNet, mean_loss

NUM_STEPS = 15  # more than three outer rounds of H = 4


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.2)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def trajectories(name: str, **overrides: dict[str, object]) -> list[list[torch.Tensor]]:
    run = Simulated(TinyNet(), adamw, preset(name, **overrides), 3)
    seen = []
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
        seen.append([p for cluster in run.parameters() for p in cluster.values()])
    return seen


def assert_same_bits(a: list[list[torch.Tensor]], b: list[list[torch.Tensor]]) -> None:
    for left, right in zip(a, b, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(left, right, strict=True))


def test_blend_one_without_delay_is_diloco() -> None:
    streaming = {"type": "streaming", "steps": 0, "alpha": 1.0}
    assert_same_bits(
        trajectories("diloco", schedule={"interval": 4}),
        trajectories("diloco", schedule={"interval": 4}, delay=streaming),
    )


def test_local_sgd_is_diloco_with_sgd_one() -> None:
    sgd_one = {"type": "sgd", "lr": 1.0}
    assert_same_bits(
        trajectories("local_sgd", schedule={"interval": 4}),
        trajectories("diloco", schedule={"interval": 4}, outer_optimizer=sgd_one),
    )


def test_local_sgd_averages_the_parameters() -> None:
    run = Simulated(TinyNet(), adamw, preset("local_sgd", schedule={"interval": 1}), 3)
    before: list[dict[str, torch.Tensor]] = []

    def keep_and_step() -> None:
        for cluster, (model, optimizer) in enumerate(zip(run.models, run.optimizers, strict=True)):
            optimizer.zero_grad()
            mean_loss(model, cluster, 1).backward()
            optimizer.step()
        before.extend(run.parameters())

    keep_and_step()
    for loop in run.loops:
        loop.launch_due()
    for loop in run.loops:
        loop.apply_ripe()
    for name, value in run.parameters()[0].items():
        mean = sum(b[name] for b in before) / 3
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-6)


def test_one_cluster_with_sgd_one_leaves_training_alone() -> None:
    run = Simulated(TinyNet(), adamw, preset("local_sgd", schedule={"interval": 4}), 1)
    alone = TinyNet()
    optimizer = adamw(alone)
    for step in range(1, NUM_STEPS + 1):
        run.train_step(mean_loss)
        optimizer.zero_grad()
        mean_loss(alone, 0, step).backward()
        optimizer.step()
    for name, value in alone.named_parameters():
        torch.testing.assert_close(run.parameters()[0][name], value.detach(), rtol=0, atol=1e-6)


def test_start_takes_cluster_zeros_weights_everywhere() -> None:
    from dsx.comm.in_process import InProcessHub, start_together
    from dsx.engines.torch import TorchAdapter
    from dsx.outer.loop import OuterLoop

    method = preset("diloco")
    nets = [TinyNet(seed) for seed in (3, 4)]
    transports = InProcessHub(Membership.of(2)).transports()
    adapters = [TorchAdapter(net, sgd(net), method.fragments) for net in nets]
    pairs = zip(adapters, transports, strict=True)
    start_together([OuterLoop(method, adapter, transport) for adapter, transport in pairs])
    for first, second in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        assert torch.equal(first, second)
    assert torch.equal(next(nets[0].parameters()), next(TinyNet(3).parameters()))


@pytest.mark.parametrize("name", CASES)
def test_drain_and_export(name: str) -> None:
    method = CASES[name].method()
    run = Simulated(TinyNet(), adamw, method, 3)
    for _ in range(NUM_STEPS):
        run.train_step(mean_loss)
    run.finish()
    assert not any(isinstance(t, Transfer) for loop in run.loops for t in loop.in_flight)
    trained = run.parameters()
    mean = {n: sum(cluster[n] for cluster in trained) / 3 for n in trained[0]}
    with run.averaged():
        for exported in run.parameters():
            if method.delay.export == "mean":
                for n, expected in mean.items():
                    torch.testing.assert_close(exported[n], expected, rtol=0, atol=1e-6)
            else:
                order = [s.name for f in run.loops[0].adapter.fragments for s in f.layout]
                flat = torch.cat([exported[n].reshape(-1) for n in order])
                assert torch.equal(flat, torch.cat(run.loops[0].state.anchor))
    for before, after in zip(trained, run.parameters(), strict=True):
        assert all(torch.equal(before[n], after[n]) for n in before)


def test_bytes_are_those_of_the_direct_exchange() -> None:
    run = Simulated(TinyNet(), sgd, preset("diloco", schedule={"interval": 4}), 3)
    for _ in range(4):
        run.train_step(mean_loss)
    numel = sum(p.numel() for p in run.models[0].parameters())
    sent = [loop.totals.bytes_sent for loop in run.loops]
    headers = 3 * (3 - 1) * (HEADER_BYTES + COMMIT_BYTES)
    assert sum(sent) == 2 * (3 - 1) * numel * 4 + headers  # both legs, over all clusters
    assert max(sent) - min(sent) <= 4 * 3


def test_an_average_that_is_not_finite_is_not_handed_out() -> None:
    """Of what has not been sent, no header told: the mean would be the first to have it."""
    run = Simulated(
        TinyNet(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        CASES["dreamddp"].method(2),
        2,
    )
    run.train_step(mean_loss)
    run.finish()
    with torch.no_grad():
        run.models[1].layers[0].weight[0, 0] = torch.nan
    before = run.parameters()[0]
    said = "step 1: the clusters' average is not finite, as the weights of another cluster are not"
    with pytest.raises(NonFiniteError, match=said), run.averaged():
        pass
    assert all(torch.equal(run.parameters()[0][name], before[name]) for name in before)


def test_training_inside_of_averaged_is_refused() -> None:
    """On exit the weights of before come back, and what was trained would be gone."""
    run = Simulated(
        TinyNet(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        CASES["diloco"].method(2),
        2,
    )
    run.train_step(mean_loss)
    with run.averaged() as average, run.averaged() as again:
        assert again is average
        with pytest.raises(RuntimeError, match=r"an inner step inside averaged\(\): .* leave"):
            run.train_step(mean_loss)
        with pytest.raises(RuntimeError, match=r"finish\(\) inside averaged\(\)"):
            run.finish()
    run.train_step(mean_loss)
    assert run.num_steps == 2
