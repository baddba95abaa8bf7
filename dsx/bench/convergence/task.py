"""What a run of a convergence study is: sizes that all share, a preset, its choices. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from dsx.core.registry import SELECTORS

if TYPE_CHECKING:
    from dsx.data.shards import Shards

BASELINE = "data_parallel"
OUTER_BASELINE = "snoo"  # data parallel with an outer Nesterov step every H: no preset of dsx
# their outer rule has no rate to choose
UNTUNED = ("local_sgd", "dreamddp", "plsgd_enp", "cocktail_sgd")
Inner = Literal["adamw", "muon"]
InnerSchedule = Literal["cosine", "cyclic"]
_LOW_RANK = {"type": "low_rank", "rank": 16, "factor_wire": "int8", "error_feedback": "fp32"}

# What "PRESET+CODEC" means: the preset's choices, with its pseudo-gradients sent so.
CODECS: dict[str, dict[str, Any]] = {
    "fp32": {"type": "dense"},
    "bf16": {"type": "quantized", "wire": "bf16", "mean_wire": "bf16"},
    "int8": {"type": "quantized", "wire": "int8"},
    "int4": {"type": "quantized", "wire": "int4"},
    "int4_ef": {"type": "quantized", "wire": "int4", "error_feedback": "fp32"},
    "fp4_e3m0": {"type": "quantized", "wire": "fp4_e3m0"},
    "ternary": {"type": "quantized", "wire": "ternary"},
    "ternary_ef": {"type": "quantized", "wire": "ternary", "error_feedback": "fp32"},
    **{
        f"{wire}_ef": {
            "type": "quantized",
            "wire": wire,
            "mean_wire": wire,
            "error_feedback": "fp32",
        }
        for wire in ("3bit", "2bit", "1bit")
    },
    # the residual of what keeps one itself, as recommended does, and both ways
    **{w: {"type": "quantized", "wire": w, "mean_wire": w} for w in ("3bit", "2bit", "1bit")},
    "low_rank": {**_LOW_RANK},
    "low_rank_dense_start": {**_LOW_RANK, "dense_rounds": 5},
    "top_k": {"type": "top_k"},
    "random_top_k": {"type": "random_top_k"},
}

# What "PRESET+VARIANT" means beside codecs. shift: a preset that is one period late stays so, and
# keeps what a cluster has done meanwhile. serial: the same of a fragment at a time, each late by a
# quarter of the period. Those of `TOGETHER` take the inner steps closer together, at a price in
# bytes, to tell what clusters lose by being apart: embeddings averages the gradients of all but the
# layers' matrices in every step, moments what the inner optimizers keep in every H, begun all
# gradients in the first twentieth; moments_2bit the first moments in few bits, slow a momentum of
# Muon's that remembers for longer. growing: H grows as the inner rate falls, at the same bytes;
# gain and tested: the outer rate, or H, follow what the guard sees (adaptive.py). Those of `KEPT`
# keep outer state in fewer bits.
TOGETHER = ("embeddings", "moments", "moments_2bit", "slow", "begun")
KEPT: dict[str, dict[str, dict[str, Any]]] = {
    "bf16_momentum": {"outer_optimizer": {"state_dtype": "bf16"}},
    "bf16_residual": {"compression": {"error_feedback": "bf16"}},
    "int8_residual": {"compression": {"error_feedback": "int8"}},
}
BESIDE = (*TOGETHER, *KEPT, "growing", "gain", "tested")  # the outer rate is chosen without them
VARIANTS = ("shift", "serial", *BESIDE)


@dataclass(frozen=True)
class Study:
    """What all runs of a study share."""

    data: str
    num_clusters: int
    num_steps: int
    interval: int
    batch_size: int
    sequence_length: int
    num_layers: int
    hidden_size: int
    num_heads: int
    inner_lr: float
    num_evaluations: int
    validation_windows: int
    device: str
    shards: Shards = "iid"
    inner_schedule: InnerSchedule = "cosine"
    problem: str = "causal"
    qk_norm: bool = False
    z_loss: float = 0.0
    inner: Inner = "adamw"
    rest_rate: float = 1.0  # of embeddings, the head and vectors, in the rate of matrices
    final_rate: float = 0.1  # of the largest, at the end
    compiled: bool = False  # models by torch.compile
    weight_decay: float = 0.1
    muon_momentum: float = 0.95


@dataclass(frozen=True)
class Own:
    """A preset's own inner settings, as multiples of data parallel's."""

    lr: float = 1.0
    rest: float = 1.0  # of embeddings, the head and vectors, beside that of all
    decay: float = 1.0

    def applied(self, study: Study) -> Study:
        """Return the study with them."""
        return replace(
            study,
            inner_lr=self.lr * study.inner_lr,
            rest_rate=self.rest * study.rest_rate,
            weight_decay=self.decay * study.weight_decay,
        )


@dataclass(frozen=True)
class Task:
    """One run: a preset with an outer rate and momentum (None: as the preset has them).

    `preset` may name a codec and a variant, too: "diloco+int4", "eager+shift". `choices` are
    further axes, which go before those of the study key by key; an axis whose type is named is
    replaced as a whole.
    """

    preset: str
    seed: int
    lr: float | None = None
    momentum: float | None = None
    choices: Mapping[str, Any] | None = None
    own: Own = Own()

    @property
    def key(self) -> str:
        """Return the name a finished run is kept under."""
        further = f"/{json.dumps(self.choices, sort_keys=True)}" if self.choices else ""
        if self.own != Own():
            further += f"/{json.dumps(asdict(self.own), sort_keys=True)}"
        return f"{self.preset}/{self.seed}/{self.lr}/{self.momentum}{further}"


def without_codec(preset: str) -> str:
    """Return what an outer rate is chosen for: a preset as it waits, whatever its codec."""
    first, *further = preset.split("+")
    return "+".join([first, *(part for part in further if part not in {*CODECS, *BESIDE})])


def overrides(study: Study, task: Task) -> dict[str, dict[str, Any]]:
    """Return the axes of a preset in this study: H for all, and links that all can live with.

    Times are in units of one inner step. CoCoDC may send half as often again as Streaming DiLoCo;
    DreamDDP's link leaves no idle time to fill; DiLoCoX's lets H fall to about a half. CocktailSGD
    is a method of every step.
    """
    preset, *further = task.preset.split("+")
    interval, layers = study.interval, study.num_layers
    axes: dict[str, dict[str, Any]] = {"schedule": {"interval": interval}}
    num_fragments = min(4, layers)
    if preset == "cocktail_sgd":
        axes["schedule"] = {"interval": 1}
    for codec in CODECS.keys() & {*further}:
        axes["compression"] = CODECS[codec]
    if preset in ("streaming_diloco", "cocodc", "dilocox"):
        axes["fragments"] = {"num_fragments": num_fragments}
    if preset == "recommended":  # on a line that is always busy
        count = min(layers, 16)
        if layers < 4:  # of few layers each would be late by much of a period
            count = 4
            axes["fragments"] = {"by": "size", "num_fragments": count}
        axes["delay"] = {"steps": max(1, interval // count)}
    if preset == "cocodc":
        seconds = 0.4 * interval / (1.5 * num_fragments)
        axes["schedule"] |= {"gamma": 0.4, "step_seconds": 1.0, "transfer_seconds": seconds}
    if preset == "dilocox":
        control = {"rank": 16, "max_rank": 64, "step_seconds": 1.0, "round_seconds": 0.4 * interval}
        axes["control"] = {**control, "min_interval": num_fragments}
    if preset == "dreamddp":
        axes["schedule"] |= {
            "backward_seconds": [1.0 / layers] * layers,
            "transfer_seconds": [1.0] * layers,
        }
    if "shift" in further:
        axes["delay"] = {"type": "shift", "outer_steps": 1}
    if "serial" in further:
        axes["schedule"] = {"type": "streaming", "interval": interval}
        axes["fragments"] = {"by": "size", "num_fragments": 4}
        axes["delay"] = {"type": "shift", "steps": max(1, interval // 4)}
    if task.lr is not None:
        axes["outer_optimizer"] = {"lr": task.lr, "momentum": task.momentum}
    for variant in KEPT.keys() & {*further}:  # of residuals one at most
        axes = merge(axes, KEPT[variant])
    return merge(axes, task.choices or {})


def merge(axes: Mapping[str, Any], choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the axes with `choices` before them, as `Task` says."""
    merged = dict(axes)
    for axis, choice in choices.items():
        whole = SELECTORS.get(axis) in choice
        merged[axis] = dict(choice) if whole else {**merged.get(axis, {}), **choice}
    return merged


def warmup_steps(study: Study) -> int:
    """Return a twentieth of the run."""
    return max(1, study.num_steps // 20)


def inner_rate(study: Study, step: int) -> float:
    """Linear warmup over a twentieth of the run, then a cosine down to `final_rate`.

    "cyclic" goes on in triangles of the same slope down to a tenth and up again, each half as high
    as the one before: torch's CyclicLR, "triangular2", as CO2 (arXiv:2401.16265, A.3.6) has it.
    """
    warmup = warmup_steps(study)
    if step <= warmup:
        return study.inner_lr * step / warmup
    if study.inner_schedule == "cyclic":
        cycle, within = divmod(step, 2 * warmup)
        height = 1 - abs(within / warmup - 1)
        return study.inner_lr * (0.1 + 0.9 * height / 2**cycle)
    progress = (step - warmup) / max(1, study.num_steps - warmup)
    half = (1 - study.final_rate) / 2
    return study.inner_lr * (study.final_rate + half * (1 + math.cos(math.pi * progress)))


def evaluation_steps(study: Study) -> set[int]:
    """Return the steps to evaluate at: at the ends of periods, the last step among them."""
    count = study.num_evaluations
    steps = {study.num_steps * (i + 1) // count for i in range(count)}
    return {min(study.num_steps, -(-s // study.interval) * study.interval) for s in steps}
