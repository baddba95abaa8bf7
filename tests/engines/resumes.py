"""Every preset over every kind of engine, stopped and gone on with; all that a run holds, by name.

The model's matrices are large enough for codecs to take them, and of sides that ZeRO cuts at
ragged places. `ROWS` are the presets, with their own codecs, and further codecs; `PLACES` the
engines. A stop is a step, or a step and a half: in between the two micro-batches of the next one,
which the resumed run then takes from its beginning, for DeepSpeed saves no gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dsx
from dsx.comm.world import current_world
from dsx.engines.deepspeed.masters import locate
from dsx.engines.deepspeed.parameters import stepping_optimizer, trained_parameters
from dsx.outer.transfer import Transfer
from tests.engines.engines import ACCUMULATION, ds_config, weights
from tests.engines.pipelines import Block, Ends, param_groups
from tests.tiny import LINK, H

MOST_TOLD = 1024  # bytes of words of saves (training/common_saves.py) beside a run's transfers
SIDE = 36
SIDES = (SIDE, 33, 40, 35, SIDE)
HALVES = {"by": "layer", "num_fragments": 2}
EVERY_H = {"interval": H}
STREAM = {"schedule": {"type": "streaming", **EVERY_H}, "fragments": HALVES}

DILOCOX: dict[str, Any] = {  # a dense round, then low rank, int4 and error feedback
    "schedule": EVERY_H,
    "fragments": {"num_fragments": 2},
    "compression": {"dense_rounds": 1},
    "control": {
        "rank": 4, "min_rank": 2, "max_rank": 8, "min_interval": 2, "window": 1,
        "step_seconds": 1.0, "round_seconds": 3.0,
    },
}  # fmt: skip


class Row(NamedTuple):
    """A preset; every stop of one of its periods, two more of them before the last step.

    `is_timed`: what it decides depends on seconds, so no two runs need be alike.
    """

    preset: str
    overrides: dict[str, Any]
    stops: tuple[int, ...] = (9, 10, 11, 12)
    last_step: int = 20
    is_timed: bool = False


ROWS = {
    "local_sgd": Row("local_sgd", {"schedule": EVERY_H}),
    "slowmo": Row("slowmo", {"schedule": EVERY_H}),
    "diloco": Row("diloco", {"schedule": EVERY_H}),
    "streaming_diloco": Row(
        "streaming_diloco", {**STREAM, "delay": {"steps": 2, "alpha": 0.3}}
    ),
    "cocodc": Row(
        "cocodc",
        {
            "schedule": {"interval": 6, "gamma": 0.7, **LINK},
            "fragments": HALVES,
            "delay": {"steps": 1, "strength": 200.0},
        },
        (7, 8, 9, 10, 11, 12),
        24,
    ),
    "diloco_delayed": Row("diloco_delayed", {"schedule": EVERY_H}),
    "eager": Row("eager", {"schedule": EVERY_H}),
    "eager_2": Row("eager_2", {"schedule": EVERY_H}),
    "eager_fp4": Row("eager_fp4", {"schedule": EVERY_H}),
    "dilocox": Row("dilocox", DILOCOX, (12, 13, 14, 15), 24),  # the rank moves at steps 12 and 20
    "co2": Row("co2", {"schedule": EVERY_H}),
    "dreamddp": Row(
        "dreamddp",
        {
            "schedule": {**EVERY_H, "backward_seconds": [1.0] * 2, "transfer_seconds": [1.0] * 2},
            "fragments": HALVES,
        },
    ),
    "opendiloco": Row("opendiloco", {"schedule": EVERY_H}),
    "plsgd_enp": Row("plsgd_enp", {"schedule": EVERY_H, "fragments": HALVES}),
    "overlap_local_sgd": Row("overlap_local_sgd", {"schedule": EVERY_H}),
    "cocktail_sgd": Row(
        "cocktail_sgd",
        {"compression": {"random_ratio": 0.25, "top_k_ratio": 0.2, "group_size": 32}},
        (9, 10),
        14,
    ),
    "averaging in fragments, overlapped": Row("dreamddp", {**STREAM, "delay": {"steps": 2}}),
    "delayed, first round local": Row(
        "diloco_delayed", {"schedule": EVERY_H, "delay": {"first_round": "local"}}, (5, 6, 7, 8), 16
    ),
    "co2, element": Row("co2", {"schedule": EVERY_H, "staleness": {"granularity": "element"}}),
    "dilocox, H falls": Row(
        "dilocox",
        {**DILOCOX, "control": {**DILOCOX["control"], "window": 2, "round_seconds": 1.0}},
        (9, 10, 11, 12, 13, 14),
        18,
    ),
    "diloco, outer Adam": Row(
        "diloco", {"schedule": EVERY_H, "outer_optimizer": {"type": "adam", "lr": 0.01}}
    ),
    "streaming, int4, feedback": Row(
        "streaming_diloco",
        {
            **STREAM,
            "delay": {"steps": 2, "alpha": 0.3},
            "compression": {"type": "quantized", "wire": "int4", "error_feedback": "bf16"},
        },
    ),
    "recommended": Row(
        "recommended", {"schedule": EVERY_H, "fragments": HALVES, "delay": {"steps": 2}}
    ),
    "shift by a whole round": Row(
        "diloco",
        {
            "schedule": EVERY_H,
            "delay": {"type": "shift", "outer_steps": 1},
            "compression": {"type": "quantized", "rounding": "stochastic"},
        },
    ),
    "diloco, stochastic int4": Row(
        "diloco",
        {
            "schedule": EVERY_H,
            "compression": {
                "type": "quantized", "rounding": "stochastic", "error_feedback": "int8",
            },
        },
    ),
    "delayed, low rank": Row(
        "diloco_delayed",
        {
            "schedule": EVERY_H,
            "compression": {"type": "low_rank", "rank": 4, "full_round_every": 3},
        },
    ),
    "eager, int4, feedback": Row(
        "eager",
        {
            "schedule": EVERY_H,
            "compression": {"type": "quantized", "error_feedback": "fp32"},
        },
    ),
    "cocodc, top-k": Row(
        "cocodc",
        {
            "schedule": {"interval": 6, "gamma": 0.7, **LINK},
            "fragments": HALVES,
            "delay": {"steps": 1},
            "compression": {"type": "top_k", "k": 16, "chunk": 256},
        },
        (7, 8, 9, 10, 11, 12),
        24,
    ),
    "cocodc, timed": Row(
        "cocodc",
        {"schedule": {"interval": 6, "gamma": 0.7}, "fragments": HALVES, "delay": {"steps": 1}},
        (7, 8, 9, 10, 11, 12),
        24,
        is_timed=True,
    ),
}  # fmt: skip


class RankInfo(NamedTuple):
    """Engines of a ZeRO stage; pipelines of so many stages; so many clusters over all ranks."""

    stage: int
    num_stages: int = 1
    precision: str = "fp32"
    num_clusters: int = 2
    num_ranks: int = 4


PLACES = {
    "zero0": RankInfo(0),
    "zero1": RankInfo(1),
    "zero2": RankInfo(2),
    "zero3": RankInfo(3),
    "pipeline, zero0": RankInfo(0, 2),
    "pipeline, zero1": RankInfo(1, 2),
    "zero1, bf16": RankInfo(1, precision="bf16"),
    "zero3, bf16": RankInfo(3, precision="bf16"),
    "pipeline, zero1, bf16": RankInfo(1, 2, "bf16"),
    "zero1, four clusters": RankInfo(1, num_clusters=4),
    "pipeline, zero1, two ranks a stage": RankInfo(1, 2, num_ranks=8),
}


class Net(nn.Module):
    """Also with a parameter of one element, of which ZeRO-3 gives the second rank only padding."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(SIDES, SIDES[1:], strict=False))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
        self.gain = nn.Parameter(torch.full((1,), 0.9))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x * self.gain
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.mse_loss(x.float(), y.float())


def make_pipeline(seed: int, num_stages: int) -> Any:
    """With tied ends."""
    from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

    shift = 100 * seed
    return PipelineModule(
        [
            TiedLayerSpec("ends", Ends, shift, SIDE),
            *(LayerSpec(Block, i + shift, SIDE) for i in range(1, 5)),
            TiedLayerSpec("ends", Ends, shift, SIDE),
        ],
        num_stages=num_stages,
        loss_fn=lambda x, y: F.mse_loss(x.float(), y),
        partition_method="uniform",
    )


def build(
    row: Row,
    place: RankInfo,
    seed: int | None = None,
    metrics: Mapping[str, Any] | None = None,
    clusters: Mapping[str, Any] | None = None,
) -> Any:
    """Return an engine with dsx attached; two parameter groups, AdamW.

    Without a seed clusters have different weights until they take cluster 0's.
    """
    import deepspeed  # noqa: F401 - which then joins the world

    config = ds_config(place.stage, place.precision, "diloco")
    config["dsx"] = {
        "preset": row.preset,
        "clusters": {
            "num_clusters": place.num_clusters,
            "deadline_seconds": 30,
            **(clusters or {}),
        },
        "metrics": dict(metrics or {}),
        **row.overrides,
    }
    if current_world() is None:
        dsx.init_distributed(config)
    seed = current_world().cluster_id if seed is None else seed
    model = Net(seed) if place.num_stages == 1 else make_pipeline(seed, place.num_stages)
    groups = param_groups(dict(model.named_parameters()), "two")
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    return dsx.initialize(model=model, config=config, optimizer=optimizer)[0]


def micro_batches(engine: Any, step: int) -> list[tuple[Tensor, Tensor]]:
    is_pipeline = engine.pipeline_parallelism
    rank = engine.grid.get_data_parallel_rank() if is_pipeline else engine.global_rank
    dtype = next(engine.module.parameters()).dtype
    batches = []
    for micro in range(ACCUMULATION):
        seed = 10_000 * engine.dsx.cluster_id + 100 * step + 10 * rank + micro
        x = torch.randn(3, SIDE, generator=torch.Generator().manual_seed(seed))
        batches.append((x.to(dtype), torch.tanh(x.roll(1, dims=1) * 1.5)))
    return batches


def take_step(engine: Any, step: int, in_between: Callable[[], None] | None = None) -> None:
    """Take one step; `in_between` is called after its first micro-batch."""
    batches = micro_batches(engine, step)
    if engine.pipeline_parallelism:
        engine.train_batch(iter(batches))
        return
    for index, (x, y) in enumerate(batches):
        engine.backward(engine(x, y))
        engine.step()
        if index == 0 and in_between is not None:
            in_between()


def inner_snapshot(engine: Any) -> dict[str, Any]:
    """Return what DeepSpeed itself holds on this rank, by name; of an engine without dsx, too."""
    held: dict[str, Any] = {f"weight/{name}": w for name, w in weights(engine).items()}
    inner = stepping_optimizer(engine)
    for name, piece in locate(engine).pieces(trained_parameters(engine)).items():
        held[f"master/{name}"] = piece.view()
        for key, value in _flat_state(inner.state[piece.master]):
            is_vector = isinstance(value, Tensor) and value.numel() == piece.master.numel() > 1
            held[f"inner.{key}/{name}"] = (
                replace(piece, master=value).view() if is_vector else value
            )
    held["groups"] = [{k: v for k, v in g.items() if k != "params"} for g in inner.param_groups]
    held["engine"] = [engine.global_steps, engine.global_samples, engine.skipped_steps]
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in held.items()}


def _flat_state(state: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return what an optimizer keeps of a parameter, the members of lists one by one."""
    flat: list[tuple[str, Any]] = []
    for key, value in state.items():
        members = value if isinstance(value, list) else [value]
        flat += [(f"{key}.{i}" if i else key, member) for i, member in enumerate(members)]
    return flat


def snapshot(engine: Any) -> dict[str, Any]:
    """Return all that this rank holds, by name: tensors, and JSON values. Waits for transfers."""
    held = inner_snapshot(engine)
    loop = engine.dsx.loop
    held["in flight"] = []
    for index, transfer in enumerate(loop.in_flight):
        entry: dict[str, Any] = {"fragment": transfer.fragment}
        if isinstance(transfer, Transfer):
            held[f"in flight.mean/{index}"] = transfer.pending.wait()
            held[f"in flight.sideband/{index}"] = transfer.buffers.sideband.values
            held[f"in flight.norm/{index}"] = transfer.contribution_norm
            if transfer.buffers.kept is not None:
                held[f"in flight.kept/{index}"] = transfer.buffers.kept
            entry |= {"launched": transfer.launched, "interval": transfer.interval}
            entry |= {
                "sync_params": asdict(transfer.sync_params),
                "parity": asdict(transfer.buffers.parity),
            }
            entry |= {"shared_by": transfer.shared_by}
            held[f"in flight.bytes sent/{index}"] = transfer.pending.bytes_sent
        held["in flight"].append(entry)
    for fragment in loop.adapter.fragments:
        for key, tensor in loop.state.named_state(fragment.id).items():
            held[f"outer.{key}/{fragment.id}"] = tensor
    held["history"] = loop.history.state_dict()
    totals = loop.totals
    held["totals"] = [totals.syncs, totals.refused]
    held["bytes sent"] = totals.bytes_sent
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in held.items()}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the names under which two snapshots differ in a bit; bytes sent, by more than words
    of saves are, which a run that goes on from one does not tell again.
    """
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [n for n in names if not _is_same(n, ours.get(n), theirs.get(n))]


def _is_same(name: str, a: Any, b: Any) -> bool:
    if "bytes sent" in name and isinstance(a, int) and isinstance(b, int):
        return abs(a - b) <= MOST_TOLD
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return type(a) is type(b) and a == b
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*pairs)


def end(engine: Any) -> None:
    engine.dsx.close()
    engine.destroy()


def train(row: Row, place: RankInfo, base: str = "", stops: Sequence[float] = ()) -> dict[str, Any]:
    """Train to the end, saving at stops; return what was held then, and at the end."""
    engine = build(row, place)
    kept: dict[str, Any] = {}

    def save(stop: float) -> None:
        kept[f"{stop:g}"] = snapshot(engine)
        engine.save_checkpoint(base, tag=f"at_{stop:g}")

    for step in range(1, row.last_step + 1):
        half = step - 0.5
        take_step(engine, step, partial(save, half) if half in stops else None)
        if step in stops:
            save(step)
    kept["end"] = snapshot(engine)
    end(engine)
    return kept


def go_on(
    row: Row,
    place: RankInfo,
    base: str,
    stop: float,
    kept: dict[str, Any],
    spoil: Callable[[Any], None] | None = None,
) -> tuple[list[str], list[str]]:
    """Load in a fresh engine and train to the end; return what differs after each."""
    engine = build(row, place)
    path, _ = engine.load_checkpoint(base, tag=f"at_{stop:g}")
    assert path is not None and engine.dsx.step == int(stop)
    if spoil is not None:
        spoil(engine)
    loaded = differences(snapshot(engine), kept[f"{stop:g}"])
    for step in range(int(stop) + 1, row.last_step + 1):
        take_step(engine, step)
    ended = [] if row.is_timed else differences(snapshot(engine), kept["end"])
    end(engine)
    return loaded, ended
