"""The named methods: each preset is one row of choices, with defaults that were found stable.

| preset | paper | row |
| --- | --- | --- |
| local_sgd | LocalSGD, arXiv:1805.09767 | whole model every H, blocking, anchor = mean |
| slowmo | SlowMo, arXiv:1910.00643 | whole model every H, blocking, heavy ball |
| diloco | DiLoCo, arXiv:2311.08105 | whole model every H, blocking, Nesterov |
| opendiloco | OpenDiLoCo, arXiv:2407.07852 | diloco at H = 500, in fp16 |
| streaming_diloco | Streaming DiLoCo, arXiv:2501.18512 | P fragments spread over H, overlap tau |
| cocodc | CoCoDC, arXiv:2504.17672 | adaptive transmission, delay compensation |
| diloco_delayed | Eager Updates, arXiv:2502.12996, Alg. 2 | diloco, applied one round late |
| eager | Eager Updates, arXiv:2502.12996, Alg. 3 | the same with one's own share at once |
| eager_2 | Eager Updates, Table 2 | the same, applied two rounds late |
| eager_fp4 | Eager Updates, Sec. 3.4 | eager, with pseudo-gradients in FP4 (E3M0) |
| dilocox | DiLoCoX, arXiv:2506.21263 | P fragments, one round late, low rank and int4, adaptive |
| co2 | CO2, arXiv:2401.16265 | one round late, heavy ball, staleness gap penalty, clip |
| dreamddp | DreamDDP, arXiv:2502.11058 | layers averaged from inside the backward |
| plsgd_enp | DreamDDP's baseline, arXiv:2502.11058, Example 1 | equal numbers of layers a step |
| overlap_local_sgd | Overlap-Local-SGD, arXiv:2002.09539 | pulled to an anchor one round late |
| cocktail_sgd | CocktailSGD, ICML 2023 | each step, the largest of random values in int4 |
| recommended | ours: docs/methods/shift.md | a fragment at a time, kept progress, 2 bit both ways |

Each is a function of the number of clusters, which only the eager ones' outer rate depends on.
Outer rates are below 0.8 of what is stable (stability.py). A momentum of 0.9 needs many rounds
(`rounds * (1 - momentum) >= 10`); for short runs use lr 0.7 and momentum 0.5 for the blocking and
streaming ones, 0.7 and 0 for eager (0.5 and 0 two rounds late), 0.4 and 0.5 for the delayed ones.
The papers' own values are under configs/paper. Only opendiloco, eager_fp4, dilocox, cocktail_sgd
and recommended compress; `compression` goes with every preset that sends pseudo-gradients. Any axis
can be overridden in the "dsx" block.
"""

from __future__ import annotations

from dataclasses import replace

from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.core.registry import register
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.delay.average import Average
from dsx.method.delay.base import Blocking
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.eager import Eager
from dsx.method.delay.one_step import OneStepDelay
from dsx.method.delay.pullback import Pullback
from dsx.method.delay.shift import Shift
from dsx.method.delay.streaming import StreamingMerge
from dsx.method.fragments import ByLayer, WholeModel
from dsx.method.method import Method
from dsx.method.outer_optimizer import SGD, Momentum, Nesterov, NoOuterStep
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.method.staleness import GapPenalty


@register("preset")
def local_sgd(num_clusters: int) -> Method:
    """Average the parameters every H steps: SGD with rate 1 makes the anchor their mean."""
    return Method(WholeModel(), Periodic(interval=100), Blocking(), SGD(lr=1.0))


@register("preset")
def slowmo(num_clusters: int) -> Method:
    """Heavy-ball momentum on the averaged progress of H steps."""
    return Method(WholeModel(), Periodic(interval=100), Blocking(), Momentum(lr=1.0, momentum=0.5))


@register("preset")
def diloco(num_clusters: int) -> Method:
    """Nesterov momentum on the averaged progress of H steps."""
    return Method(WholeModel(), Periodic(interval=100), Blocking(), Nesterov(lr=0.7, momentum=0.9))


@register("preset")
def opendiloco(num_clusters: int) -> Method:
    """DiLoCo at H = 500 with pseudo-gradients in fp16."""
    return Method(
        WholeModel(),
        Periodic(interval=500),
        Blocking(),
        Nesterov(lr=0.7, momentum=0.9),
        compression=Quantized(wire="fp16", mean_wire="fp16", small_wire="fp16"),
    )


@register("preset")
def streaming_diloco(num_clusters: int) -> Method:
    """Strided fragments of layers at fixed offsets within H, each overlapped by tau steps."""
    return Method(
        ByLayer(num_fragments="auto"),
        Streaming(interval=100),
        StreamingMerge(steps=2, alpha=0.5),
        Nesterov(lr=0.4, momentum=0.9),
    )


@register("preset")
def cocodc(num_clusters: int) -> Method:
    """Fragments sent as often as the link carries, the fastest changing first, compensated."""
    return Method(
        ByLayer(num_fragments="auto"),
        AdaptiveTransmission(interval=100, gamma=0.4),
        DelayCompensation(steps=2, strength=0.5),
        Nesterov(lr=0.4, momentum=0.9),
    )


@register("preset")
def diloco_delayed(num_clusters: int) -> Method:
    """DiLoCo with a whole round to hide the transfer behind, at a lower outer rate."""
    return Method(
        WholeModel(), Periodic(interval=100), OneStepDelay(), Nesterov(lr=0.2, momentum=0.9)
    )


@register("preset")
def eager(num_clusters: int) -> Method:
    """Delayed DiLoCo that goes on from the cluster's own share of what is under way."""
    lr = _rate_for(num_clusters, ((2, 0.4), (4, 0.3), (8, 0.25)), 0.2)
    return Method(WholeModel(), Periodic(interval=100), Eager(), Nesterov(lr=lr, momentum=0.9))


@register("preset")
def eager_2(num_clusters: int) -> Method:
    """Eager with two rounds under way, for transfers that take up to two rounds."""
    lr = _rate_for(num_clusters, ((2, 0.2), (4, 0.1), (8, 0.075)), 0.06)
    return Method(
        WholeModel(),
        Periodic(interval=100),
        Eager(outer_steps=2),
        Nesterov(lr=lr, momentum=0.9),
    )


@register("preset")
def eager_fp4(num_clusters: int) -> Method:
    """Eager whose pseudo-gradients travel in four bits, a sign and three of exponent."""
    return replace(eager(num_clusters), compression=Quantized(wire="fp4_e3m0"))


def _rate_for(num_clusters: int, rates: tuple[tuple[int, float], ...], least: float) -> float:
    """Return the first rate that goes with up to so many clusters, or `least`."""
    return next((rate for most, rate in rates if num_clusters <= most), least)


@register("preset")
def dilocox(num_clusters: int) -> Method:
    """Low-rank int4 fragments, applied one round late, with rank and H from the last spectra."""
    return Method(
        ByLayer(num_fragments="auto", pattern="sequential"),
        Periodic(interval=125),
        OneStepDelay(),
        Nesterov(lr=0.2, momentum=0.9),
        control=AdaptiveRank(rank=64, max_rank=256),
        compression=LowRank(factor_wire="int4", error_feedback="fp32", dense_rounds=5),
    )


@register("preset")
def co2(num_clusters: int) -> Method:
    """Heavy ball one round late, each gradient shrunk by how far the anchor has moved on.

    The clip has the threshold of the authors' program; the paper prints none.
    """
    return Method(
        WholeModel(),
        Periodic(interval=100),
        OneStepDelay(),
        Momentum(lr=0.5, momentum=0.2, clip=1.0),
        staleness=GapPenalty(),
    )


@register("preset")
def dreamddp(num_clusters: int) -> Method:
    """Every layer averaged once in H steps or oftener, launched right after its backward."""
    return Method(ByLayer(), Layerwise(interval=5), Average(), NoOuterStep())


@register("preset")
def plsgd_enp(num_clusters: int) -> Method:
    """As many layers as in every other step averaged in each of H steps, right after backwards."""
    schedule = Layerwise(interval=5, assignment="equal_numbers")
    return Method(ByLayer(), schedule, Average(), NoOuterStep())


@register("preset")
def overlap_local_sgd(num_clusters: int) -> Method:
    """Local models pulled toward an anchor that is averaged one round late, with momentum."""
    return Method(
        WholeModel(), Periodic(interval=100), Pullback(alpha=0.6), Momentum(lr=1.0, momentum=0.7)
    )


@register("preset")
def cocktail_sgd(num_clusters: int) -> Method:
    """Each step the largest of randomly picked changes in int4; the rest stays local till later."""
    return Method(
        WholeModel(),
        Periodic(interval=1),
        Shift(outer_steps=1),
        SGD(lr=1.0),
        compression=RandomTopK(error_feedback="none"),
    )


@register("preset")
def recommended(num_clusters: int) -> Method:
    """What our studies found best for the bytes: one layer after another, in 2 bit both ways.

    A fragment is applied as soon as the line has carried it, and what a cluster has done meanwhile
    stays in its model. With Muon for matrices, and AdamW at three times its rate for embeddings;
    for 500 rounds or more, and an inner rate that falls to near 0 (training/advice.py says so).
    """
    return Method(
        ByLayer(most=16),
        Streaming(interval=16),
        Shift(steps="auto"),
        Nesterov(lr=1.0, momentum=0.5),
        compression=Quantized(wire="2bit", mean_wire="2bit"),
    )
