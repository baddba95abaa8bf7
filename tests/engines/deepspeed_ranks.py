"""Small models that DeepSpeed divides over ranks otherwise than by data, and the same undivided.

`Kind.divides`: "sequence" (Ulysses' attention of deepspeed.sequence), "experts" (DeepSpeed's MoE,
every token to its first expert, none dropped), "tensor" (AutoTP), "data" (ZeRO alone). The model
of `whole_model` is in plain torch, on one process, with the names of the whole model: the oracle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.engines.deepspeed.engine import adopt_world
from tests.engines.engines import ACCUMULATION, ds_config
from tests.reference import Recipe, train_reference
from tests.tiny import H

WIDTH, HEADS, EXPERTS, LENGTH, BATCH, LAYERS = 8, 2, 4, 4, 2, 2
STREAMING: dict[str, Any] = {
    "preset": "streaming_diloco",
    "schedule": {"interval": H},
    "fragments": {"num_fragments": 2},
    "delay": {"steps": 2, "alpha": 0.3},
}
ALONE: dict[str, Any] = {  # averaged in place with nobody
    "preset": "local_sgd",
    "clusters": {"num_clusters": 1},
    "schedule": {"interval": H},
    "fragments": {},
    "delay": {"type": "average"},
    "outer_optimizer": {"type": "none"},
}


class Kind(NamedTuple):
    """What is divided, over how many ranks of a cluster; ZeRO's stage and DeepSpeed's types."""

    divides: str
    stage: int
    size: int = 2
    precision: str = "fp32"
    zero: Mapping[str, Any] = {}


class Attention(nn.Module):
    """Of whole heads: [batch, sequence, heads, width of a head]."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        return (scores.softmax(-1) @ v).transpose(1, 2).contiguous()


class AttentiveLayer(nn.Module):
    """`group`: the ranks among which Ulysses exchanges heads for parts of the sequence."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        self.q, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # that of a bias is zero but for rounding
        self.attention: nn.Module = Attention()
        if group is not None:
            from deepspeed.sequence.layer import DistributedAttention

            self.attention = DistributedAttention(self.attention, group, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (HEADS, -1)) for one in (self.q, self.k, self.v))
        return x + self.o(self.attention(q, k, v, 0).flatten(-2))


class First(nn.Module):
    """DeepSpeed's MoE in plain torch, by its names: each token by its first expert."""

    def __init__(self) -> None:
        super().__init__()
        self.deepspeed_moe = nn.Module()
        self.deepspeed_moe.gate = nn.Module()
        self.deepspeed_moe.gate.wg = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.deepspeed_moe.experts = nn.Module()
        self.deepspeed_moe.experts.deepspeed_experts = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> tuple[Tensor]:
        gates = self.deepspeed_moe.gate.wg(x).softmax(-1)
        most, first = gates.max(-1)
        every = torch.stack([e(x) for e in self.deepspeed_moe.experts.deepspeed_experts], -2)
        chosen = every.gather(-2, first[..., None, None].expand(*first.shape, 1, WIDTH))
        return (most.unsqueeze(-1) * chosen.squeeze(-2),)


class ExpertLayer(nn.Module):
    """`size`: over how many ranks the experts are divided; 0 in plain torch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        if not size:
            self.moe: nn.Module = First()
            return
        from deepspeed.moe.layer import MoE

        expert = nn.Linear(WIDTH, WIDTH)
        self.moe = MoE(
            WIDTH, expert, EXPERTS, size, k=1, drop_tokens=False, use_rts=False, min_capacity=0
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        return x + self.moe(x)[0]


class SlicedLayer(nn.Module):
    """Two matrices of which AutoTP cuts the first by columns and the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Two layers; the loss given targets: `share` of it is what this rank's tokens are of all."""

    def __init__(self, layers: Sequence[nn.Module], share: float = 1.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._share = share

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x.float(), y.float()) * self._share


def whole_model(divides: str, seed: int) -> Net:
    """Return the undivided model."""
    makers = {
        "sequence": lambda: AttentiveLayer(None),
        "experts": lambda: ExpertLayer(0),
        "tensor": SlicedLayer,
        "data": SlicedLayer,
    }
    model = Net([makers[divides]() for _ in range(LAYERS)])
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.4
    return model


def divided_model(kind: Kind, seed: int) -> Net:
    """Return what DeepSpeed is given on this rank, with the undivided model's values."""
    whole = whole_model(kind.divides, seed)
    if kind.divides in ("tensor", "data"):
        return whole
    if kind.divides == "sequence":
        group = sequence_mpu(kind.size).get_sequence_parallel_group()
        model = Net([AttentiveLayer(group) for _ in range(LAYERS)], 1 / kind.size)
        model.load_state_dict(whole.state_dict())
        return model
    model = Net([ExpertLayer(kind.size) for _ in range(LAYERS)])
    local = EXPERTS // kind.size
    first = dist.get_rank() % kind.size * local
    values = whole.state_dict()
    own = {
        name: values[re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: _shifted(m, first), name)]
        for name in model.state_dict()
    }
    model.load_state_dict(own)
    return model


def _shifted(found: re.Match[str], first: int) -> str:
    return f"{found[1]}{int(found[2]) + first}"


class DealingMpu:
    """DeepSpeed's own mpu of sequence parallelism with what deals samples over data ranks."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size() // self._plain.get_sequence_parallel_world_size()

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank() // self._plain.get_sequence_parallel_world_size()


def sequence_mpu(size: int) -> Any:
    """Return DeepSpeed's mpu of sequence parallelism, made once in a process."""
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as mpu

    if mpu._SEQUENCE_PARALLEL_GROUP is None:
        mpu.initialize_sequence_parallel(size)
    return mpu


def arguments_of(kind: Kind, seed: int | None = None, **block: Any) -> dict[str, Any]:
    """Return what `initialize` is given; `seed` None: the cluster's own."""
    config = ds_config(kind.stage, kind.precision, "diloco")
    config["zero_optimization"] |= kind.zero
    config["train_micro_batch_size_per_gpu"] = BATCH
    clusters = {"num_clusters": 2, "deadline_seconds": 30}
    config["dsx"] = {"clusters": clusters, **(block or STREAMING)}
    if current_world() is None:
        dsx.init_distributed(config)
    adopt_world()
    from deepspeed.utils import groups

    groups.mpu = None  # of the engine before
    seed = current_world().cluster_id if seed is None else seed
    model = divided_model(kind, seed)
    given: dict[str, Any] = {"model": model, "config": config}
    if kind.divides == "sequence":
        given["mpu"] = sequence_mpu(kind.size)
    if kind.divides == "tensor":
        specs = [
            {"patterns": [rf".*\.{name}\.weight$"], "partition_type": how}
            for name, how in (("up", "column"), ("down", "row"))
        ]
        partition = {"use_default_specs": False, "layer_specs": specs}
        config["tensor_parallel"] = {"autotp_size": kind.size, "partition_config": partition}
    given["optimizer"] = torch.optim.AdamW(param_groups(kind, model), lr=0.01)
    return given


def param_groups(kind: Kind, model: nn.Module) -> Any:
    parameters = list(model.parameters())
    if kind.divides != "experts":
        return parameters
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

    return split({"params": parameters, "name": "all"})


def initialize(kind: Kind, seed: int | None = None, **block: Any) -> Any:
    """Return an engine with dsx attached."""
    return dsx.initialize(**arguments_of(kind, seed, **block))[0]


def initialize_plain(kind: Kind, seed: int = 0, **block: Any) -> Any:
    """Return DeepSpeed's own engine."""
    import deepspeed

    given = arguments_of(kind, seed, **block)
    config = {k: v for k, v in given.pop("config").items() if k != "dsx"}
    return deepspeed.initialize(config=config, dist_init_required=False, **given)[0]


def sample(cluster: int, step: int, part: int) -> tuple[Tensor, Tensor]:
    """Return a micro-batch, `part` of the step's: [batch, sequence, width] both."""
    generator = torch.Generator().manual_seed(10_000 * cluster + 100 * step + part)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    return x, torch.tanh(x.roll(1, dims=1) * 1.5)


def readers(kind: Kind) -> tuple[int, int]:
    """Return this rank's place among those that read other samples."""
    rank, count = dist.get_rank(), dist.get_world_size()
    is_alone = kind.divides in ("experts", "data")  # a reader of its own
    return (rank, count) if is_alone else (rank // kind.size, count // kind.size)


def own_part(kind: Kind, x: Tensor) -> Tensor:
    """Return what of [batch, sequence, width] this rank computes."""
    if kind.divides != "sequence":
        return x
    return x.split(LENGTH // kind.size, 1)[dist.get_rank() % kind.size]


def take_step(engine: Any, kind: Kind, step: int, cluster: int) -> list[float]:
    """Take one step; return the losses of its micro-batches on this rank."""
    losses = []
    reader, _ = readers(kind)
    for micro in range(ACCUMULATION):
        x, y = sample(cluster, step, reader * ACCUMULATION + micro)
        x, y = own_part(kind, x), own_part(kind, y)
        dtype = next(engine.module.parameters()).dtype
        loss = engine(x.to(dtype), y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def whole_weights(engine: Any, kind: Kind) -> dict[str, Tensor]:
    """Return the cluster's weights by the undivided model's names, fp32. Collective."""
    from deepspeed.utils import groups

    from tests.engines.engines import weights

    own = weights(engine)
    if kind.divides == "experts":
        rank, local = dist.get_rank() % kind.size, EXPERTS // kind.size
        own = {
            re.sub(r"(deepspeed_experts\.)(\d+)", lambda m: _shifted(m, rank * local), n): w
            for n, w in own.items()
        }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    if kind.divides == "tensor":
        slices = [everyone[r] for r in range(kind.size)]
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        assert groups.get_tensor_model_parallel_world_size() == kind.size
        return {
            name: torch.cat([s[name] for s in slices], dims[tail])
            if (tail := ".".join(name.split(".")[2:])) in dims
            else weight
            for name, weight in own.items()
        }
    found: dict[str, Tensor] = {}
    for rank in everyone:
        for name, weight in rank.items():
            assert name not in found or torch.equal(found[name], weight), name
            found[name] = weight
    return found


def reference(kind: Kind, num_steps: int, num_readers: int) -> list[dict[str, Tensor]]:
    """Return every cluster's weights after the same training of the whole model in plain torch."""
    names = [name for name, _ in whole_model(kind.divides, 0).named_parameters()]
    halves = [[n for n in names if n.startswith(f"layers.{i}.")] for i in range(LAYERS)]
    parts = num_readers * ACCUMULATION
    return train_reference(
        whole_model(kind.divides, 0),
        lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
        lambda model, cluster, step: (
            sum(model(*sample(cluster, step, i)) for i in range(parts)) / parts
        ),
        Recipe(halves, H, True, 2, 0.3, "nesterov", 0.4, 0.9),
        2,
        num_steps,
    )[0]
