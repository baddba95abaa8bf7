"""Plain PyTorch models over two ranks of each of two clusters: DDP, FSDP2, compiled or not."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

import dsx
from dsx.comm.world import current_world
from dsx.core.types import Fragment
from dsx.method.method import Method
from dsx.outer.transfer import Totals
from tests.engines.resumes import HALVES, SIDE, STREAM, Net
from tests.fsdp2_on_cpu import serve_fsdp2
from tests.simulated import Simulated
from tests.tiny import H

serve_fsdp2()
RANKS, CLUSTERS = 2, 2
STOP, LAST = 10, 14
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "diloco": ("diloco", {"schedule": {"interval": H}}),
    "streaming": ("streaming_diloco", {**STREAM, "delay": {"steps": 2, "alpha": 0.3}}),
    "co2": ("co2", {"schedule": {"interval": H}}),  # with a penalty per tensor
    "layerwise": (
        "dreamddp",
        {
            "schedule": {"interval": H, "backward_seconds": [1.0] * 2,
                         "transfer_seconds": [1.0] * 2},
            "fragments": HALVES,
        },
    ),
    "measured": (
        "cocodc",
        {"schedule": {"interval": 6, "gamma": 0.7}, "fragments": HALVES, "delay": {"steps": 1}},
    ),
    "int4": (
        "streaming_diloco",
        {**STREAM, "compression": {"type": "quantized", "error_feedback": "fp32"}},
    ),
    "low rank": (
        "diloco_delayed",
        {"schedule": {"interval": H}, "compression": {"type": "low_rank", "rank": 4}},
    ),
}  # fmt: skip


class Kind(NamedTuple):
    """A way to train one model on several ranks, by a method."""

    wrap: str
    method: str
    optimizers: str = "adamw"


def config_of(method: str, **clusters: Any) -> dict[str, Any]:
    name, overrides = METHODS[method]
    world = {"num_clusters": CLUSTERS, "deadline_seconds": 30, **clusters}
    return {"dsx": {"preset": name, "clusters": world, **overrides}}


def method_of(method: str) -> Method:
    name, overrides = METHODS[method]
    return dsx.preset(name, CLUSTERS, **overrides)


def batch(cluster: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * cluster + 10 * step + part)
    x = torch.randn(3, SIDE, generator=generator)
    return x, torch.tanh(x.roll(1, dims=1) * 1.5)


def adamw(model: nn.Module) -> list[Optimizer]:
    return [AdamW(model.parameters(), lr=0.01)]


def muon(model: nn.Module) -> list[Optimizer]:
    """Matrices by torch's Muon, the rest by AdamW."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.01), AdamW(rest, lr=0.01)]


class Codes(Optimizer):
    """SGD whose momentum is int8 codes and a scale per tensor, as 8-bit optimizers keep it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in [p for group in self.param_groups for p in group["params"] if p.grad is not None]:
            kept = self.state[p]
            before = kept["codes"].float() * kept["scale"] if kept else torch.zeros_like(p)
            momentum = 0.9 * before + p.grad
            kept["scale"] = momentum.abs().amax() / 127 + 1e-12
            kept["codes"] = (momentum / kept["scale"]).round().to(torch.int8)
            p.sub_(momentum, alpha=0.02)


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": adamw, "muon": muon, "codes": lambda model: [Codes(model.parameters())],
}  # fmt: skip


def wrap(kind: str, net: nn.Module) -> nn.Module:
    """Return the module that is attached, and called."""
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if kind == "compiled ddp":
        return torch.compile(nn.parallel.DistributedDataParallel(net), backend="eager")
    if kind == "ddp of compiled":
        return nn.parallel.DistributedDataParallel(torch.compile(net, backend="aot_eager"))
    if kind == "ddp compiled in place":
        model = nn.parallel.DistributedDataParallel(net)
        model.compile(backend="eager")
        return model
    return shard(kind, net)


def shard(kind: str, net: nn.Module) -> nn.Module:
    """Shard a Net by layers with `fully_shard`."""
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),))}
    if kind == "hsdp":
        size = (2, dist.get_world_size() // 2)
        options = {"mesh": init_device_mesh("cpu", size, mesh_dim_names=("copies", "shards"))}
    if kind == "fsdp bf16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in net.layers:
        fully_shard(layer, **options)
        if kind == "fsdp compiled blocks":
            layer.compile(backend="eager")
    fully_shard(net, **options)
    return torch.compile(net, backend="eager") if kind == "compiled fsdp" else net


class Trained(NamedTuple):
    """What a run has come to, on one rank; `wire` is what it sends of each fragment."""

    weights: dict[str, Any]
    average: dict[str, Any]
    fragments: list[Fragment]
    wire: list[Fragment]
    launches: list[int]
    totals: Totals


class Run:
    """Trains; saves and loads what is the script's own beside the outer state."""

    def __init__(self, kind: Kind, seed: int = 0, config: Any = None) -> None:
        world = current_world()
        assert world is not None
        self.world, self.net = world, Net(seed + world.cluster_id)
        self.model = wrap(kind.wrap, self.net)
        self.optimizers = OPTIMIZERS[kind.optimizers](self.model)
        config = config or config_of(kind.method)
        self.handle = dsx.attach(self.model, self.optimizers, config=config)

    def take_step(self, step: int) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.model(*batch(self.world.cluster_id, step, self.world.rank)).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def save(self, directory: Path) -> None:
        weights, moments = get_state_dict(self.model, self.optimizers)
        dcp.save({"model": weights, "optimizers": moments}, checkpoint_id=directory / "script")
        self.handle.save(directory)

    def load(self, directory: Path) -> None:
        weights, moments = get_state_dict(self.model, self.optimizers)
        dcp.load({"model": weights, "optimizers": moments}, checkpoint_id=directory / "script")
        set_state_dict(
            self.model, self.optimizers, model_state_dict=weights, optim_state_dict=moments
        )
        self.handle.load(directory)

    def weights(self) -> dict[str, Any]:
        """Return the whole parameters by their own names."""
        found = {}
        for (name, p), (given, _) in zip(
            self.model.named_parameters(), Net(0).named_parameters(), strict=True
        ):
            assert name.endswith(given)
            whole = p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach()
            found[given] = whole.clone().numpy()
        return found

    def finish(self) -> Trained:
        self.handle.finish()
        sent = Totals(**vars(self.handle.totals))
        with self.handle.averaged():
            average = self.weights()
        loop = self.handle.loop
        fragments, launches = list(loop.adapter.fragments), list(loop.history.launches)
        wire = [gather.wire for gather in loop.matrix_gathers]
        trained = Trained(self.weights(), average, fragments, wire, launches, sent)
        self.handle.close()
        return trained


def directory_of(base: str, kind: Kind) -> Path:
    world = current_world()
    assert world is not None
    return Path(base) / "-".join(kind).replace(" ", "_") / f"cluster_{world.cluster_id}"


def train(kinds: list[Kind], base: str) -> list[tuple[Trained, Trained]]:
    """Return what each kind comes to, and what it does from a checkpoint of the midst of it."""
    dsx.init_distributed(config_of("diloco"))
    found = []
    for kind in kinds:
        torch._dynamo.reset()
        directory, whole = directory_of(base, kind), Run(kind)
        for step in range(1, LAST + 1):
            whole.take_step(step)
            if step == STOP:
                whole.save(directory)
        dist.barrier()
        trained = whole.finish()
        resumed = Run(kind, seed=7)
        resumed.load(directory)
        for step in range(STOP + 1, LAST + 1):
            resumed.take_step(step)
        found.append((trained, resumed.finish()))
    return found


def reference(method: str, optimizers: str, num_ranks: int) -> Simulated:
    """Return the same training with every cluster's ranks as one, in this process."""

    def mean_loss(model: nn.Module, cluster: int, step: int) -> Tensor:
        parts = [model(*batch(cluster, step, part)) for part in range(num_ranks)]
        return sum(parts) / num_ranks

    run = Simulated(Net(0), OPTIMIZERS[optimizers], method_of(method), CLUSTERS)
    for _ in range(LAST):
        run.train_step(mean_loss)
    run.finish()
    return run


def said_of(model: nn.Module, method: str = "diloco") -> str:
    """Return why a model is not taken."""
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    try:
        dsx.attach(model, optimizer, config=config_of(method)).close()
    except ValueError as error:
        return str(error)
    return "attached"


def refusals() -> dict[str, str]:
    """Return what is said of placements that are not served."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (RANKS,))
    columns, ignored, parallel, flat = Net(0), Net(0), Net(0), Net(0)
    fully_shard(columns.layers[0], mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    fully_shard(columns, mesh=mesh)
    leaves_out = "ignored_params" in inspect.signature(fully_shard).parameters  # not torch 2.6
    fully_shard(ignored, mesh=mesh, **({"ignored_params": {ignored.gain}} if leaves_out else {}))
    both = init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("data", "tensor"))
    parallelize_module(parallel, both["tensor"], {"layers.0": RowwiseParallel()})
    fully_shard(parallel, mesh=both["data"])
    alone = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("apart", "alone"))["alone"]
    apart = Net(0)
    fully_shard(apart, mesh=alone)
    half, mixed = shard("fsdp", Net(0).to(torch.bfloat16)), Net(0)
    mixed.gain = torch.nn.Parameter(distribute_tensor(mixed.gain.detach(), mesh, [Replicate()]))
    for layer in mixed.layers:
        if next(layer.parameters(), None) is not None:
            fully_shard(layer, mesh=mesh)
    return {
        "layers": said_of(shard("fsdp", Net(0)), "layerwise"),
        "columns": said_of(columns),
        "tensor parallel": said_of(parallel),
        "ignored": said_of(ignored) if leaves_out else "",
        "apart": said_of(apart),
        "half": said_of(half),
        "mixed": said_of(mixed),
        "fsdp 1": said_of(FullyShardedDataParallel(flat, device_id=torch.device("cpu"))),
    }


def change_placement(base: str) -> tuple[dict[str, Any], Trained, Trained]:
    """Return refusals, what shards come to, and copies from a checkpoint of them.

    "gathered" is whether an evaluation inside `averaged` reads the average, behind one that has
    left gathered copies of the root's parameters.
    """
    dsx.init_distributed(config_of("diloco"))
    said: dict[str, Any] = refusals()
    kind = Kind("fsdp", "streaming")
    directory, whole = directory_of(base, kind), Run(kind)
    for step in range(1, LAST + 1):
        whole.take_step(step)
        if step == STOP:
            whole.save(directory)
    data = batch(0, 1, 0)
    with torch.no_grad():
        before = float(whole.model(*data))
        with whole.handle.averaged():
            inside = float(whole.model(*data))
            averages = [float(v) for v in whole.handle.gather(inside)]
        after = float(whole.model(*data))
    said["gathered"] = before == after != inside and averages[0] == averages[1]
    dist.barrier()
    trained = whole.finish()
    other = Run(Kind("ddp", "streaming"), seed=7)
    other.load(directory)
    for step in range(STOP + 1, LAST + 1):
        other.take_step(step)
    return said, trained, other.finish()
