"""A rank on the second of two devices, whose transfers run in threads of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dsx.bench.gpu.job import SHORT
from dsx.comm.gloo import GlooTransport
from dsx.compress.factor_products import SideProducts, require_exact
from dsx.config.schema import preset
from dsx.core.membership import Seat
from dsx.core.side_stream import SideStream
from dsx.engines.torch import TorchAdapter
from dsx.outer.loop import OuterLoop
from dsx.outer.resources import Resources
from tests.gpu.simulated import notes

DEVICE, WIDTH, NUM_STEPS = torch.device("cuda", 1), 256, 26
PRODUCTS = ("of_rows", "of_columns", "orthonormal")


class Wide(nn.Module):
    """Matrices large enough that low rank takes them; returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def main(name: str, state: str = "masters") -> None:
    """Train `name`; AssertionError if a line of dsx waits on the training thread, or elsewhere."""
    torch.manual_seed(0)
    torch.cuda.set_device(DEVICE)
    notes.keep_to(1)
    num_products = counted_products()
    loop = train(name, state)
    waits, elsewhere = notes.of_training(), notes.elsewhere()
    print("rounds:", sum(loop.history.rounds), "products:", len(num_products))
    for note in sorted({*waits, *elsewhere}, key=str):
        print(note)
    assert sum(loop.history.rounds) > 2
    assert bool(num_products) == loop.method.compression.makes_factors
    assert all(p.isfinite().all() for p in loop.adapter.model.parameters())
    assert not elsewhere
    assert not waits


def train(name: str, state: str) -> OuterLoop:
    """Return the loop behind NUM_STEPS steps, and with its transfers' threads ended."""
    method = preset(name, 1, **SHORT[name])
    model = Wide().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = TorchAdapter(
        model, optimizer, method.fragments, method.schedule.backwards, state == "host"
    )
    side = None
    if method.compression.makes_factors:
        side = SideStream(DEVICE)
        require_exact(side)
    places = list(range(len(adapter.fragments)))
    transport = GlooTransport(places, lambda what, number: [], Seat.of(0, 1), 60.0)
    loop = OuterLoop(method, adapter, transport, resources=Resources(side=side))
    loop.start()
    notes.taken.clear()
    inputs = torch.randn(4, WIDTH, device=DEVICE)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        model(inputs).backward()
        optimizer.step()
        loop.after_inner_step()
        loop.launch_due()
        loop.apply_ripe()
        adapter.end_inner_step()
    transport.close()
    return loop


def counted_products() -> list[str]:
    """Return a list that each product on the device adds its name to from here on."""
    made: list[str] = []

    def counting(name: str) -> None:
        product = getattr(SideProducts, name)

        def counted(self: SideProducts, *arguments: Tensor) -> Tensor:
            made.append(name)
            return product(self, *arguments)

        setattr(SideProducts, name, counted)

    for name in PRODUCTS:
        counting(name)
    return made
