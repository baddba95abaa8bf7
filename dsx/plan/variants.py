"""What a plan varies of a preset: the number of fragments, the codec; and what that costs.

Presets are those that are registered, each as it stands; another one is planned for alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from dsx.compress.base import Compressor, Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import CASTS, Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.method.choices import AXES
from dsx.method.fragments import MOST_OF_AUTO, ByLayer, usual_count
from dsx.method.method import Method
from dsx.method.outer_optimizer import SGD, Momentum, NoOuterStep
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.periodic import Streaming

MOST_LAYERWISE = 64  # fragments of a layer each: all have a thread and connections of their own
LEAST_RANK = 16  # of factors that are tried
_UNKNOWN_LOSS = 0.5  # of a codec that came from outside


@dataclass(frozen=True)
class Codec:
    """A choice of `compression`, with the keys of blocks that make it, and what it loses.

    `loss` is in doublings of H, like a method's harm (see ranking.py). `rank` is a controller's.
    """

    name: str
    compression: Compressor
    loss: float
    block: Mapping[str, Any]
    rank: int | None = None


def _quantized(loss: float, **fields: Any) -> Codec:
    choice = Quantized(**fields)
    return Codec(choice.wire, choice, loss, {"type": "quantized", **fields})


CODECS = (
    Codec("fp32", Dense(), 0.0, {}),
    _quantized(0.02, wire="bf16"),
    _quantized(0.1, wire="int8"),
    _quantized(0.3, wire="int4", error_feedback="fp32"),
)


_OF_PRESETS = (
    _quantized(0.4, wire="fp4_e3m0"),
    _quantized(0.5, wire="2bit", mean_wire="2bit"),
)
_KNOWN = {codec.compression: codec for codec in (*CODECS, *_OF_PRESETS)}


def codecs_for(method: Method, hidden: int | None) -> list[Codec]:
    """Return what a preset may send in; factors need the sizes of matrices, `hidden` wide.

    Every halving of a rank is worth a quarter doubling of H. A codec other than those known here
    is planned for as the preset has it.
    """
    own = method.compression
    if not method.delay.needs_anchor:  # it sends parameters, which no codec may touch
        return [CODECS[0]]
    if isinstance(own, Dense):
        return list(CODECS)
    if isinstance(own, RandomTopK):
        rounds = 1 / (own.random_ratio * own.top_k_ratio)  # until all elements have been sent
        return [Codec("random top-k", own, math.log2(rounds), {})]
    if isinstance(own, Quantized) and not isinstance(own, LowRank) and own.wire in CASTS:
        return [Codec(own.wire, own, CODECS[1].loss, {})]
    if not isinstance(own, LowRank):
        name = AXES["compression"].choices.of(own)
        codec = _KNOWN.get(own, Codec(name, own, _UNKNOWN_LOSS, {}))
        return [replace(codec, block={})]
    found: list[Codec] = []
    for halvings in range(2, 8) if hidden else ():
        rank = (hidden or 0) >> halvings
        loss = 0.5 + 0.25 * ((hidden or 0) // max(rank, 1)).bit_length() - 0.25
        if rank >= LEAST_RANK and method.control.largest_rank:
            found.append(Codec("low rank", own, loss, {}, rank))
        elif rank >= LEAST_RANK:
            compression = replace(own, rank=rank)
            found.append(Codec("low rank", compression, loss, {"rank": rank}))
    return found


def fragment_counts(method: Method, most: int) -> list[int]:
    """Return the numbers of fragments of a stage that are tried, at most `most`.

    The preset's own; where they are sent one by one also twice that, or four instead of one per
    layer.
    """
    fragments = method.fragments
    own = usual_count(fragments)
    if not isinstance(fragments, ByLayer):
        return [own or 1]
    is_streamed = isinstance(method.schedule, Streaming)
    if own is None:
        by_layer = min(fragments.most or MOST_LAYERWISE, most)
        return sorted({by_layer, min(MOST_OF_AUTO, most)} if is_streamed else {by_layer})
    return sorted({min(count, most) for count in (own, 2 * own if is_streamed else own)})


def with_fragments(method: Method, count: int) -> Method:
    """Return a preset cut into so many; a layer each in runs of layers, if there are too many."""
    fragments = method.fragments
    if not isinstance(fragments, ByLayer):
        return method
    is_by_layer = fragments.num_fragments is None and fragments.most is None
    pattern = "sequential" if is_by_layer else fragments.pattern
    return replace(method, fragments=replace(fragments, num_fragments=count, pattern=pattern))


def with_backwards(method: Method, micro_batches: int) -> Method:
    """Return a preset whose launches, if inside the backward, are in the last of so many."""
    if method.schedule.when is None:
        return method
    return replace(method, schedule=replace(cast(Any, method.schedule), backwards=micro_batches))


def with_codec(method: Method, codec: Codec) -> Method:
    """Return a preset that sends in a codec; a controller of the rank is held at the codec's."""
    control: Any = method.control
    if codec.rank is not None:
        control = replace(control, rank=codec.rank, max_rank=codec.rank)
    return replace(method, compression=codec.compression, control=control)


def with_steps(method: Method, steps: int | Literal["auto"]) -> Method:
    """Return a preset at another tau."""
    return replace(method, delay=replace(cast(Any, method.delay), steps=steps))


def launched_less(
    method: Method, transfer_steps: Sequence[float], num_stages: int
) -> Iterator[Method]:
    """Yield a method; if it launches as often as a line lets it, then in fewer and fewer steps.

    A launch costs the training thread, and a fast line has room for one in every step. Halves down
    to one step in 64: `transfer_steps` are the steps that fragments' transfers take.
    """
    yield method
    schedule = method.schedule
    if not isinstance(schedule, AdaptiveTransmission):
        return
    every_step = num_stages * sum(transfer_steps) / len(transfer_steps)
    for halvings in range(1, 7):
        gamma = float(f"{every_step / 2**halvings:.2g}")
        if gamma < schedule.gamma:
            yield replace(method, schedule=replace(schedule, gamma=gamma))


def staleness_of(method: Method) -> float:
    """Return what a method's delay and outer rule cost, in doublings of H, beside tau / H.

    The worst of it: a round late, plain averaging, heavy ball or fragments that step apart.
    """
    late = 0.8 if method.delay.splits_update else 1.0
    found = [0.0, late * method.delay.rounds_under_way]
    if isinstance(method.outer_optimizer, (SGD, NoOuterStep)):
        found.append(0.3)
    if isinstance(method.outer_optimizer, Momentum) or method.schedule.takes_turns:
        found.append(0.1)
    return max(found)
