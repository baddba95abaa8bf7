"""Tables of DiLoCoX (arXiv:2506.21263).

Trainings have the paper's number of rounds, 32 of DiLoCoX, with fewer steps in each. Throughputs
are predicted at the paper's scale, a step's tokens and seconds being taken from two of its own.
"""

from __future__ import annotations

import json
from functools import lru_cache

from dsx.bench.convergence.task import BASELINE, Study
from dsx.bench.paper.measure import Loss, Several, Simulation
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
_GRID = ((0.5, 0.0), (1.0, 0.0), (0.5, 0.5))

_LOSS = Column("val_loss", "loss")
_SENT = Column("bytes_per_cluster", "bytes sent", "{:.3g}")
_THROUGHPUT = Column("tokens_per_second", "tokens/s", "{:,.4g}")

_HALF_RANK = {  # as 2048 of 8192 halves the matrices: a quarter of hidden 128; H is held
    "control": {"rank": 32, "min_rank": 4, "max_rank": 32, "round_seconds": 1e9}
}
_UNCOMPRESSED = {"control": {"type": "fixed"}, "compression": {"type": "dense"}}
_BLOCKING = {"delay": {"type": "blocking"}}

_INTERVAL, _BITS_PER_SECOND = 125, 1e9
_TOKENS_PER_STEP = 32768  # 745 tokens/s of 1.3B parameters in fp32 at 1 Gbit/s: 44 s per step
_QWEN = GPT(
    80, 8192, 47104, 64, 8, 152064,
    is_gated=True, has_bias=False, has_qkv_bias=True, is_rms_norm=True, is_tied=False,
)  # fmt: skip
_QWEN_RANK = {"rank": 2048, "min_rank": 2048, "max_rank": 2048, "min_interval": _INTERVAL}
_QWEN_HIDDEN = 3728.0  # tokens/s of the paper's full DiLoCoX, in which nothing waits for the line
_STAGES = 20  # of four layers


@lru_cache
def _utilization(preset: str, axes: str, step_seconds: float) -> float:
    """Return what dsx's planner says of Qwen1.5-107B, one rank per stage and cluster."""
    import dsx
    from dsx.core.types import Stage
    from dsx.plan.link import Link
    from dsx.plan.predict import data_parallel, predict
    from dsx.plan.traffic import one_rank

    link = Link(_BITS_PER_SECOND)
    if preset == BASELINE:
        return data_parallel([_QWEN.numel], 2, step_seconds, link).utilization
    method = dsx.preset(preset, 2, **json.loads(axes))
    stages = [_QWEN.stage(Stage(index, _STAGES)) for index in range(_STAGES)]
    ranks = [one_rank(method.fragments, parameters)[0] for parameters in stages]
    return predict(method, ranks, step_seconds, link, 2).utilization


def throughput_of_qwen(row: Row, seed: int, short: bool) -> dict[str, float]:
    """Return tokens per second of Qwen1.5-107B in two clusters at 1 Gbit/s, as predicted.

    H is 125 and the rank 2048; a step is as long as the paper's throughput with all hidden says.
    """
    axes = {**row.overrides, "schedule": {"interval": _INTERVAL}}
    if "type" not in axes.get("control", {}):
        axes["control"] = _QWEN_RANK
    utilization = _utilization(row.preset, json.dumps(axes), _TOKENS_PER_STEP / _QWEN_HIDDEN)
    return {"tokens_per_second": utilization * _QWEN_HIDDEN}


_TABLE1 = Table(
    name="dilocox-table1",
    where="DiLoCoX, Table 1",
    title="ablation of overlap and compression",
    rows=(
        Row("Full DiLoCoX", "dilocox", _HALF_RANK,
            {"val_loss": 4.20, "tokens_per_second": 3728}),
        Row("w/o Overlap", "dilocox", {**_HALF_RANK, **_BLOCKING},
            {"val_loss": 4.15, "tokens_per_second": 2197}),
        Row("w/o Compression", "dilocox", _UNCOMPRESSED,
            {"val_loss": 4.02, "tokens_per_second": 1168}),
        Row("AllReduce", BASELINE, {}, {"val_loss": 3.90, "tokens_per_second": 10.4}),
    ),
    columns=(_LOSS, _SENT, _THROUGHPUT),
    claims=(
        Claim("val_loss", ("AllReduce", "w/o Compression", "w/o Overlap", "Full DiLoCoX")),
        Claim(
            "tokens_per_second",
            ("Full DiLoCoX", "w/o Overlap", "w/o Compression", "AllReduce"),
            lower_is_better=False,
        ),
    ),
    measure=Several((
        Loss(_STUDY, _SHORT, (7.0, 1.0), short_seeds=(0,), grid=_GRID),
        Simulation(throughput_of_qwen),
    )),
    note="Loss: trained here. Tokens/s: predicted for 107B parameters at 1 Gbit/s.",
)  # fmt: skip

TABLES: tuple[Table, ...] = (_TABLE1,)
