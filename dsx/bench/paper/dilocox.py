"""Tables of DiLoCoX (arXiv:2506.21263).

Trainings have the paper's number of rounds, 32 of DiLoCoX, with fewer steps in each. Throughputs
are predicted at the paper's scale, a step's tokens and seconds being taken from two of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from dsx.bench.convergence.task import BASELINE, Study
from dsx.bench.paper.measure import Lines, Loss, Several, Simulation
from dsx.bench.paper.table import Claim, Column, Row, Table
from dsx.plan.gpt_shapes import GPT

_STUDY = Study(
    data="", num_clusters=2, num_steps=800, interval=25, batch_size=4, sequence_length=32,
    num_layers=2, hidden_size=128, num_heads=4, inner_lr=3e-3, num_evaluations=8,
    validation_windows=512, device="cpu",
)  # fmt: skip
_SHORT = Study(
    data="", num_clusters=2, num_steps=160, interval=5, batch_size=4, sequence_length=32,
    num_layers=2, hidden_size=128, num_heads=4, inner_lr=3e-3, num_evaluations=4,
    validation_windows=256, device="cpu",
)  # fmt: skip
_SHORT_B = replace(_SHORT, num_steps=400)  # two rounds of H = 200
_LONG = replace(_STUDY, num_steps=4000, interval=125, num_evaluations=16)
_SHORT_LONG = replace(_STUDY, num_steps=500, interval=125, num_evaluations=4)
_GRID = ((0.25, 0.0), (0.5, 0.0), (1.0, 0.0), (1.5, 0.0), (0.25, 0.5), (0.5, 0.5))

_LOSS = Column("val_loss", "loss")
_SENT = Column("bytes_per_cluster", "bytes sent", "{:.3g}")
_APART = Column("divergence", "divergence", "{:.3f}")
_FIGURES = (
    _LOSS, _SENT, _APART,
    Column("steps_to_target", "steps to the\nworst best loss", "{:.0f}"),
    Column("bytes_to_target", "bytes to it", "{:.3g}"),
)  # fmt: skip
_THROUGHPUT = Column("tokens_per_second", "tokens/s", "{:,.1f}")

_INT4 = {
    "control": {"type": "fixed"},
    "compression": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
}
_LOW_RANK = {  # halves what int4 alone sends, as 2048 of 8192 does; H is held
    "control": {"rank": 16, "min_rank": 4, "max_rank": 16, "round_seconds": 1e9}
}
_UNCOMPRESSED = {"control": {"type": "fixed"}, "compression": {"type": "dense"}}
_BLOCKING = {"delay": {"type": "blocking"}}


def _every(steps: int) -> dict[str, Any]:
    return {"schedule": {"interval": steps}}


def _top_k(ratio: float) -> dict[str, Any]:
    return {"compression": {"top_k_ratio": ratio}}


_INTERVAL, _BITS_PER_SECOND = 125, 1e9
_TOKENS_PER_STEP = 32768  # 745 tokens/s of 1.3B parameters in fp32 at 1 Gbit/s: 44 s per step


@dataclass(frozen=True)
class _Model:
    """A model of the paper: `hidden_tokens` per second are DiLoCoX's, where no transfer is seen."""

    shape: GPT
    num_stages: int
    hidden_tokens: float


_OPT = _Model(GPT(24, 2048, 8192, 32, 32, 50272, positions=2050), 8, 23880.0)
_QWEN = _Model(
    GPT(80, 8192, 47104, 64, 8, 152064,
        is_gated=True, has_bias=False, has_qkv_bias=True, is_rms_norm=True, is_tied=False),
    20, 3728.0,
)  # fmt: skip
_QWEN_RANK = {"rank": 2048, "min_rank": 2048, "max_rank": 2048, "min_interval": _INTERVAL}


@lru_cache
def _utilization(model: _Model, preset: str, axes: str) -> float:
    """Return what dsx's planner says of two clusters, one rank per stage in each."""
    import dsx
    from dsx.core.types import Stage
    from dsx.plan.link import Link
    from dsx.plan.predict import data_parallel, predict
    from dsx.plan.traffic import one_rank

    step_seconds, link = _TOKENS_PER_STEP / model.hidden_tokens, Link(_BITS_PER_SECOND)
    if preset == BASELINE:
        return data_parallel([model.shape.numel], 2, step_seconds, link).utilization
    method = dsx.preset(preset, 2, **json.loads(axes))
    stages = [model.shape.stage(Stage(i, model.num_stages)) for i in range(model.num_stages)]
    ranks = [one_rank(method.fragments, parameters)[0] for parameters in stages]
    return predict(method, ranks, step_seconds, link, 2).utilization


def _tokens_per_second(model: _Model, row: Row, axes: Mapping[str, Any]) -> float:
    return model.hidden_tokens * _utilization(model, row.preset, json.dumps(axes))


def throughput_of_qwen(row: Row, seed: int, short: bool) -> dict[str, float]:
    """Return tokens per second of Qwen1.5-107B in two clusters at 1 Gbit/s, as predicted.

    H is 125 and the rank 2048; a step is as long as the paper's throughput with all hidden says.
    """
    axes = {**row.overrides, **_every(_INTERVAL)}
    if "type" not in axes.get("control", {}):
        axes["control"] = _QWEN_RANK
    return {"tokens_per_second": _tokens_per_second(_QWEN, row, axes)}


def throughput_of_both(row: Row, seed: int, short: bool) -> dict[str, float]:
    """Return `opt` and `qwen`: tokens per second of both models at the paper's settings."""
    found = {"opt": _tokens_per_second(_OPT, row, row.overrides)}
    axes: dict[str, Any] = dict(row.overrides)
    if row.preset == "dilocox":
        axes = {**_every(_INTERVAL), "control": _QWEN_RANK}
    if row.preset == "cocktail_sgd":
        axes = _top_k(0.04)
    return found | {"qwen": _tokens_per_second(_QWEN, row, axes)}


_BEST = {"outer_optimizer": {"lr": 1.0, "momentum": 0.0}}  # by figure 3(a)'s tuning
_BEST_DELAYED = {"outer_optimizer": {"lr": 0.5, "momentum": 0.0}}

_FIG3 = Table(
    name="dilocox-fig3",
    where="DiLoCoX, Figure 3(a), OPT-1.3B",
    title="loss at equal bytes: H and int4, a larger H and fp16, or CocktailSGD in every step",
    rows=(
        Row("AllReduce", BASELINE, {}, {"val_loss": 4.06}),
        Row("DiLoCoX", "dilocox", _INT4, {"val_loss": 4.27}),
        Row("OpenDiLoCo", "opendiloco", _every(100), {"val_loss": 5.37}),
        Row("CocktailSGD", "cocktail_sgd", {}, {"val_loss": 5.79}),
    ),
    columns=_FIGURES,
    claims=(Claim("val_loss", ("AllReduce", "DiLoCoX", "OpenDiLoCo", "CocktailSGD")),),
    measure=Loss(_STUDY, _SHORT, (10.0, 2.0), short_seeds=(0,), grid=_GRID, target="common"),
    note="H is 25 and 100, for the paper's 125 and 500; indices count as bytes, so CocktailSGD's "
    "published shares, 0.1 and 0.08, are equal to that.",
)
_FIG3B = Table(
    name="dilocox-fig3b",
    where="DiLoCoX, Figure 3(b), Qwen1.5-107B",
    title="loss at half of these bytes: low rank and int4 against CocktailSGD",
    rows=(
        Row("AllReduce", BASELINE, {}, {"val_loss": 3.90}),
        Row("DiLoCoX", "dilocox", {**_LOW_RANK, **_BEST_DELAYED}, {"val_loss": 4.20}),
        Row("CocktailSGD", "cocktail_sgd", _top_k(0.04), {"val_loss": 5.23}),
        Row("OpenDiLoCo", "opendiloco", {**_every(200), **_BEST}),
    ),
    columns=_FIGURES,
    claims=(Claim("val_loss", ("AllReduce", "DiLoCoX", "CocktailSGD")),),
    measure=Loss(_STUDY, _SHORT_B, (5.0, 1.2), short_seeds=(0,), target="common"),
    note="Outer rates: those of dilocox-fig3. OpenDiLoCo did not fit the paper's GPUs here.",
)
_LONGER = Table(
    name="dilocox-long",
    where="DiLoCoX, Figure 3(a), OPT-1.3B",
    title="the same with the paper's own 4000 steps, H of 125 and 500",
    rows=(
        Row("AllReduce", BASELINE, {}, {"val_loss": 4.06}),
        Row("DiLoCoX", "dilocox", {**_INT4, **_BEST_DELAYED}, {"val_loss": 4.27}),
        Row("OpenDiLoCo", "opendiloco", {**_every(500), **_BEST}, {"val_loss": 5.37}),
        Row("CocktailSGD, equal bytes", "cocktail_sgd", _top_k(0.009), {"val_loss": 5.79}),
        Row("CocktailSGD, as published", "cocktail_sgd", {}),
    ),
    columns=_FIGURES,
    claims=(
        Claim("val_loss", ("AllReduce", "DiLoCoX", "OpenDiLoCo", "CocktailSGD, equal bytes")),
        Claim("val_loss", ("DiLoCoX", "CocktailSGD, as published")),
    ),
    measure=Loss(_LONG, _SHORT_LONG, (9.0, 1.5), (0,), (0,), target="common"),
    note="With the published shares CocktailSGD sends four times as much here, indices counted.",
)
_FIG4 = Table(
    name="dilocox-fig4",
    where="DiLoCoX, Figure 4 and Section 4.2.2",
    title="tokens/s of both models at 1 Gbit/s, predicted",
    rows=(
        Row("AllReduce", BASELINE, {}, {"opt": 745, "qwen": 10.4}),
        Row("OpenDiLoCo", "opendiloco", {}),
        Row("CocktailSGD", "cocktail_sgd", {}, {"opt": 16161, "qwen": 2427}),
        Row("DiLoCoX", "dilocox", {**_INT4, **_every(_INTERVAL)}, {"opt": 23880, "qwen": 3728}),
    ),
    columns=(
        Column("opt", "OPT-1.3B", "{:,.0f}"),
        Column("qwen", "Qwen1.5-107B", "{:,.1f}"),
    ),
    claims=(
        Claim("opt", ("DiLoCoX", "CocktailSGD", "AllReduce"), lower_is_better=False),
        Claim("qwen", ("DiLoCoX", "CocktailSGD", "AllReduce"), lower_is_better=False),
    ),
    measure=Simulation(throughput_of_both),
    note="A step's compute is taken from DiLoCoX's own throughput, which hides its transfers.",
)
_FIG4_LINE = Table(
    name="dilocox-fig4-line",
    where="DiLoCoX, Figure 4(a), OPT-1.3B",
    title="speed-up on a line whose all-reduce takes as long as 32 steps",
    rows=(
        Row("AllReduce", BASELINE, {}, {"speedup": 1.0}),
        Row("OpenDiLoCo", "opendiloco", _every(500)),
        Row("CocktailSGD", "cocktail_sgd", {}, {"speedup": 21.7}),
        Row("DiLoCoX", "dilocox", {**_INT4, **_every(_INTERVAL)}, {"speedup": 32.1}),
    ),
    columns=(
        Column("speedup", "times AllReduce", "{:.1f}"),
        Column("utilization", "utilization", "{:.3f}"),
        Column("wire_bytes", "on the wire", "{:.3g}"),
    ),
    claims=(Claim("speedup", ("DiLoCoX", "CocktailSGD", "AllReduce"), lower_is_better=False),),
    measure=Lines(32.0, "4,64,64,8", (6.0, 4.5)),
)
_TABLE1 = Table(
    name="dilocox-table1",
    where="DiLoCoX, Table 1",
    title="ablation of overlap and compression",
    rows=(
        Row("Full DiLoCoX", "dilocox", {**_LOW_RANK, **_BEST_DELAYED},
            {"val_loss": 4.20, "tokens_per_second": 3728}),
        Row("w/o Overlap", "dilocox", {**_LOW_RANK, **_BLOCKING, **_BEST},
            {"val_loss": 4.15, "tokens_per_second": 2197}),
        Row("w/o Compression", "dilocox", {**_UNCOMPRESSED, **_BEST_DELAYED},
            {"val_loss": 4.02, "tokens_per_second": 1168}),
        Row("AllReduce", BASELINE, {}, {"val_loss": 3.90, "tokens_per_second": 10.4}),
    ),
    columns=(_LOSS, _SENT, _APART, _THROUGHPUT),
    claims=(
        Claim("val_loss", ("AllReduce", "w/o Compression", "w/o Overlap", "Full DiLoCoX")),
        Claim(
            "tokens_per_second",
            ("Full DiLoCoX", "w/o Overlap", "w/o Compression", "AllReduce"),
            lower_is_better=False,
        ),
    ),
    measure=Several((
        Loss(_STUDY, _SHORT, (6.0, 0.5), short_seeds=(0,)),
        Simulation(throughput_of_qwen),
    )),
    note="Loss: trained here, outer rates those of dilocox-fig3. Tokens/s: predicted for 107B "
    "parameters at 1 Gbit/s.",
)  # fmt: skip

TABLES: tuple[Table, ...] = (_FIG3, _FIG3B, _LONGER, _FIG4, _FIG4_LINE, _TABLE1)
