"""Methods with their state on the device, two clusters in one process, against a CPU's bits."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from dsx.comm.in_process import InProcessHub, start_together, step_together
from dsx.core.membership import Membership
from dsx.engines.torch import TorchAdapter
from dsx.method.method import Method
from dsx.outer.loop import OuterLoop
from tests.gpu.simulated.programs.low_rank import CASES
from tests.tiny import TinyNet, batch

NUM_CLUSTERS, NUM_STEPS = 2, 26


def main(*names: str) -> None:
    """Compare these cases, all of them if none is named; print each with what was the same."""
    torch.set_num_threads(1)
    for name in names or CASES:
        method = CASES[name].method(NUM_CLUSTERS)
        for precision in ("fp32", "bf16"):
            expected = trained(method, "cpu", precision)
            for state in ("masters", "host") if precision == "fp32" else ("masters",):
                found = trained(method, "cuda", precision, state)
                for ours, theirs in zip(found, expected, strict=True):
                    assert torch.equal(ours, theirs), (name, precision, state)
                print("the same:", name, precision, state, flush=True)


def trained(method: Method, device: str, precision: str, state: str = "masters") -> list[Tensor]:
    """Return each cluster's parameters, and its anchor, behind NUM_STEPS steps."""
    models = [TinyNet().to(device) for _ in range(NUM_CLUSTERS)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=False) for m in models]
    loops: list[OuterLoop] = []
    transports = InProcessHub(Membership.of(NUM_CLUSTERS)).transports()
    for model, optimizer, transport in zip(models, optimizers, transports, strict=True):
        backwards = method.schedule.backwards
        adapter = TorchAdapter(model, optimizer, method.fragments, backwards, state == "host")
        loops.append(OuterLoop(method, adapter, transport))
        if method.outer_optimizer.keeps_anchor:
            is_there = (device, state) == ("cuda", "masters")
            assert loops[-1].state.anchor[0].is_cuda == is_there
    start_together(loops)
    for step in range(1, NUM_STEPS + 1):
        for cluster, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            inner_step(model, optimizer, batch(cluster, step), device, precision)
        step_together(loops)
        for loop in loops:
            loop.adapter.end_inner_step()
    return [flat(list(model.parameters())) for model in models] + [
        flat(loop.state.anchor) for loop in loops
    ]


def inner_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data: tuple[Tensor, Tensor],
    device: str,
    precision: str,
) -> None:
    """Train one step of one cluster."""
    optimizer.zero_grad()
    x, y = (part.to(device) for part in data)
    with torch.autocast(device, torch.bfloat16) if precision == "bf16" else nullcontext():
        loss = model(x, y)
    loss.backward()
    optimizer.step()


def flat(tensors: list[Tensor]) -> Tensor:
    """Return all elements in fp32 on the host, in order."""
    return torch.cat([torch.zeros(0), *(t.detach().cpu().float().flatten() for t in tensors)])
