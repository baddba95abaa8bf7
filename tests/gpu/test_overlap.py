"""A launch on an accelerator leaves the compute stream alone: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dsx.comm.gloo import GlooTransport
from dsx.comm.in_process import InProcessHub, start_together, step_together
from dsx.config.schema import preset
from dsx.core.membership import Membership, Seat
from dsx.engines.torch import TorchAdapter
from dsx.outer.loop import OuterLoop
from tests.simulated import Simulated
from tests.tiny import ALL_CASES, TinyNet, batch, mean_loss

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUMEL = 256 * 2**20  # 1 GiB: some 20 to 50 ms to the host


def large_loop() -> tuple[OuterLoop, torch.nn.Parameter]:
    """One cluster with one large fragment on the device, on the transport of real runs."""
    model = torch.nn.ParameterDict({"w": torch.zeros(NUMEL // 4096, 4096, device="cuda")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = preset("streaming_diloco", 1, schedule={"interval": 4}, delay={"steps": 2},
                    fragments={"by": "model"})  # fmt: skip
    adapter = TorchAdapter(model, optimizer, method.fragments, 1)
    transport = GlooTransport([0], lambda what, n: [], Seat.of(0, 1), 60.0)
    loop = OuterLoop(method, adapter, transport)
    loop.start()
    return loop, model["w"]


def launch_and_compute(loop: OuterLoop, matrix: torch.Tensor, num_products: int) -> float:
    """Go to the boundary that launches, then give the compute stream work; return its seconds."""
    while (loop.history.step + 1) % loop.method.schedule.interval:
        loop.after_inner_step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    loop.launch_due()
    issued = time.perf_counter() - started
    for _ in range(num_products):
        matrix @ matrix
    return issued


def test_the_copy_runs_beside_the_compute_stream(tmp_path: Path) -> None:
    """In a trace, kernels of the compute stream run while the fragment is copied to the host."""
    loop, _ = large_loop()
    matrix = torch.randn(4096, 4096, device="cuda")
    launch_and_compute(loop, matrix, 3)  # everything once: streams, pinned memory, kernels
    loop.apply_ripe()
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        launch_and_compute(loop, matrix, 60)
        torch.cuda.synchronize()
    loop.apply_ripe()
    profile.export_chrome_trace(str(tmp_path / "trace.json"))
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [e for e in events if e.get("ph") == "X" and "dur" in e]
    copies = [e for e in timed if "DtoH" in e["name"]]
    copy = max(copies, key=lambda e: e["dur"])
    kernels = [e for e in timed if e.get("cat") == "kernel" and "gemm" in e["name"].lower()]
    inside = [
        e for e in kernels
        if copy["ts"] < e["ts"] and e["ts"] + e["dur"] < copy["ts"] + copy["dur"]
    ]  # fmt: skip
    assert len(inside) >= 3, f"the copy took {copy['dur']} us, {len(kernels)} products beside it"
    assert {e["args"]["stream"] for e in inside} != {copy["args"]["stream"]}
    loop.transport.close()


def test_a_launch_returns_long_before_the_copy_has_ended() -> None:
    loop, weight = large_loop()
    issued = [launch(loop) for _ in range(3)][-1]
    source, target = weight.detach().view(-1), torch.empty(NUMEL, pin_memory=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    target.copy_(source)
    copied = time.perf_counter() - started
    assert issued < 0.25 * copied
    loop.transport.close()


def launch(loop: OuterLoop) -> float:
    """Return the training thread's seconds of one launch, which is then applied."""
    issued = launch_and_compute(loop, torch.zeros(1, 1, device="cuda"), 0)
    loop.in_flight[-1].pending.wait()  # type: ignore[union-attr]
    loop.apply_ripe()
    return issued


def test_what_the_side_stream_reads_is_not_written_meanwhile() -> None:
    """The copy is held up; masters and the penalty's sizes change before it begins."""
    model = torch.nn.ParameterDict({"w": torch.zeros(1000, 1000, device="cuda")})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = preset("co2", 1, schedule={"interval": 2}, staleness={"granularity": "element"})
    adapter = TorchAdapter(model, optimizer, method.fragments, 1)
    loop = OuterLoop(method, adapter, GlooTransport([0], lambda what, n: [], Seat.of(0, 1), 60.0))
    loop.start()
    loop.after_inner_step()
    sizes = loop.state.slots[0].staleness["first_step"]
    sizes.fill_(3.0)
    model["w"].data.fill_(-2.0)
    stream = loop.launches.host_copies._stream
    assert stream is not None
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
    loop.launch_due()
    sizes.fill_(7.0)
    model["w"].data.fill_(9.0)
    for _ in range(4):  # memory that was freed too early would be given out here
        torch.full((1000, 1000), 11.0, device="cuda")
    transfer = loop.in_flight[-1]
    assert (transfer.pending.wait() == 2.0).all()  # type: ignore[union-attr]
    assert (transfer.buffers.sideband.averages == 3.0).all()  # type: ignore[union-attr]
    loop.transport.close()


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco", "eager", "cocodc", "co2"])
def test_a_run_on_the_device_equals_one_on_the_host(name: str) -> None:
    """The copies' order is right: nothing is read or written too early."""
    method = ALL_CASES[name].method(2)

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    host = Simulated(TinyNet(), sgd, method, 2)
    device = Simulated(TinyNet().cuda(), sgd, method, 2)
    for _ in range(24):
        host.train_step(mean_loss)
        device.train_step(lambda model, c, t: model(*(x.cuda() for x in batch(c, t))))
    for ours, theirs in zip(device.parameters(), host.parameters(), strict=True):
        for key, value in theirs.items():
            assert (ours[key].cpu() - value).abs().max() < 1e-5


def test_state_on_the_host_takes_nothing_on_the_device_and_gives_the_same() -> None:
    method = ALL_CASES["streaming_diloco"].method(2)
    results: list[list[torch.Tensor]] = []
    for is_on_host in (False, True):
        hub, models, loops = (
            InProcessHub(Membership.of(2)),
            [TinyNet().cuda() for _ in range(2)],
            [],
        )
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for model, optimizer, transport in zip(models, optimizers, hub.transports(), strict=True):
            adapter = TorchAdapter(model, optimizer, method.fragments, 1, is_on_host)
            loops.append(OuterLoop(method, adapter, transport))
            assert loops[-1].state.anchor[0].is_cuda != is_on_host
            assert not is_on_host or loops[-1].state.anchor[0].is_pinned()
        start_together(loops)
        for step in range(1, 25):
            for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                optimizer.zero_grad()
                model(*(x.cuda() for x in batch(cluster, step))).backward()
                optimizer.step()
            step_together(loops)
        results.append([p.detach().cpu() for p in models[1].parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert (ours - theirs).abs().max() < 1e-5
