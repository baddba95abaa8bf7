"""What is simulated: a model that computes, what it sends when, and what a transfer costs.

N parameters in L equal layers, T seconds of pure compute per inner step. `data_parallel` sends
every layer in every step, and so do `wfbp`, in buckets of layers that each take the latency, and
`asc_wfbp`, whose latencies pass at once (wfbp.py); `diloco` every layer every H steps; `streaming`
one fragment every k steps, one after another, where k is `max(1, round(H / P))` as in the published
tables unless `launch_every` says otherwise, so that a round, in which each fragment is sent once,
has k * P steps. The next steps but `overlap_steps` (tau) do not wait for a transfer.

A transfer takes its bytes over the bandwidth of a cluster's line, which sends and receives at
once; the algorithm factor `2 (C - 1) / C` is of ring, or all-to-all with all-gather. Whatever is
sent arrives `latency_seconds` late, and the line takes the next launch when all of one has arrived.
`codec_seconds_per_byte` of fp32 (4 bytes per parameter) add to the line's time, too, because the
thread of a transfer encodes, sends and decodes in turn.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from dsx.core.checks import require_choice

MethodName = Literal["data_parallel", "diloco", "streaming", "wfbp", "asc_wfbp"]
OF_EVERY_STEP = ("data_parallel", "wfbp", "asc_wfbp")
Pattern = Literal["strided", "sequential"]
Granularity = Literal["layer", "fragment"]
MAX_LAYERS = 10_000
_FP32_BYTES = 4


@dataclass(frozen=True)
class Compute:
    """One cluster's model and the seconds of one inner step without communication."""

    params: float
    layers: int
    step_seconds: float

    def __post_init__(self) -> None:
        require_number("params", self.params, 1, 1e15)
        require_number("layers", self.layers, 1, MAX_LAYERS)
        require_number("step_seconds", self.step_seconds, 1e-9, 1e9)

    @property
    def node_seconds(self) -> float:
        """`u`: L forwards, L backwards for parameters, L - 1 for activations."""
        return self.step_seconds / (3 * self.layers - 1)


@dataclass(frozen=True)
class Sync:
    """What is sent when.

    `granularity` layer: a layer leaves after its backward, and its next forward waits for it, as in
    the published tables. fragment: all of it leaves after the step, and a step waits for all.
    """

    method: MethodName
    interval: int = 100
    overlap_steps: int = 0
    layers_per_fragment: int = 3
    pattern: Pattern = "strided"
    launch_every: int | None = None
    granularity: Granularity = "layer"

    def __post_init__(self) -> None:
        require_choice("method", self.method, MethodName)
        require_choice("pattern", self.pattern, Pattern)
        require_choice("granularity", self.granularity, Granularity)
        require_number("interval", self.interval, 1, 10**6)
        require_number("overlap_steps", self.overlap_steps, 0, 10**6)
        require_number("layers_per_fragment", self.layers_per_fragment, 1, MAX_LAYERS)
        if self.method in OF_EVERY_STEP and self.overlap_steps:
            raise ValueError(
                f"overlap_steps={self.overlap_steps} must be 0 with method {self.method}, whose "
                "next step waits for every transfer; try method diloco with interval 1"
            )
        if self.method != "streaming" and self.pattern != "strided":
            raise ValueError(
                f"pattern={self.pattern!r} goes with method streaming; {self.method} sends whole "
                "models: leave it out"
            )
        if self.method in ("wfbp", "asc_wfbp") and self.granularity != "layer":
            raise ValueError(
                f"granularity={self.granularity!r}: {self.method} sends while the backward goes "
                "on; leave it out, or use method data_parallel, which then sends after it"
            )
        if self.launch_every is not None:
            require_number("launch_every", self.launch_every, 1, 10**6)
            if self.method != "streaming":
                raise ValueError(
                    f"launch_every={self.launch_every} goes with method streaming; for "
                    f"{self.method} leave it out"
                )


@dataclass(frozen=True)
class Wire:
    """What a transfer costs; `bits` are per parameter, before the algorithm factor."""

    bits: float = 16.0
    clusters: int = 2
    latency_seconds: float = 0.0
    codec_seconds_per_byte: float = 0.0

    def __post_init__(self) -> None:
        require_number("bits", self.bits, 1e-6, 1024)
        require_number("clusters", self.clusters, 2, 10**6)
        require_number("latency_seconds", self.latency_seconds, 0, 1e9)
        require_number("codec_seconds_per_byte", self.codec_seconds_per_byte, 0, 1)

    @property
    def algorithm_factor(self) -> float:
        """What a cluster sends, over what it contributes."""
        return 2 * (self.clusters - 1) / self.clusters


@dataclass(frozen=True)
class Scenario:
    """One run of `rounds` rounds, drained: it ends when compute and all transfers have ended."""

    compute: Compute
    sync: Sync
    wire: Wire
    rounds: int = 20

    def __post_init__(self) -> None:
        require_number("rounds", self.rounds, 20, 10**5)
        sync, layers = self.sync, self.compute.layers
        if sync.method in ("streaming", "wfbp") and sync.layers_per_fragment > layers:
            raise ValueError(
                f"layers_per_fragment={sync.layers_per_fragment} must be 1 to {layers}, the "
                f"model's layers; try {layers}, or method diloco for whole models"
            )
        longest = max(sync.interval, self.steps_per_round)
        if sync.overlap_steps > longest:
            raise ValueError(
                f"overlap_steps={sync.overlap_steps} must be 0 to {longest}, a round's steps; try "
                f"{longest}, or a longer interval"
            )

    @cached_property
    def fragments(self) -> list[list[int]]:
        """Return the layers of each fragment, counted from 0 at the input, ascending."""
        layers = range(self.compute.layers)
        if self.sync.method == "wfbp":  # from the output end, as the backward goes
            size = self.sync.layers_per_fragment
            return [
                list(layers[max(0, stop - size) : stop]) for stop in range(len(layers), 0, -size)
            ]
        if self.sync.method != "streaming":
            return [list(layers)]
        count = math.ceil(len(layers) / self.sync.layers_per_fragment)
        if self.sync.pattern == "strided":
            return [list(layers[first::count]) for first in range(count)]
        fragments: list[list[int]] = [[] for _ in range(count)]
        for layer in layers:
            fragments[layer * count // len(layers)].append(layer)
        return fragments

    @property
    def launch_every(self) -> int:
        """`k`: steps from one launch to the next."""
        if self.sync.method in OF_EVERY_STEP:
            return 1
        if self.sync.launch_every is not None:
            return self.sync.launch_every
        return max(1, round(self.sync.interval / len(self.fragments)))

    @property
    def steps_per_round(self) -> int:
        """Inner steps in which every layer is sent once."""
        return 1 if self.sync.method in OF_EVERY_STEP else self.launch_every * len(self.fragments)

    @property
    def compute_seconds(self) -> float:
        """Of one round, without communication."""
        return self.steps_per_round * self.compute.step_seconds

    @property
    def bits_per_round(self) -> float:
        """What each cluster sends in a round."""
        return self.wire.algorithm_factor * self.wire.bits * self.compute.params

    @property
    def bytes_per_round(self) -> float:
        """What each cluster sends in a round."""
        return self.bits_per_round / 8

    @property
    def codec_seconds(self) -> float:
        """Of one round."""
        return self.wire.codec_seconds_per_byte * _FP32_BYTES * self.compute.params

    @property
    def latency_seconds(self) -> float:
        """Of one round: of all its launches."""
        return self.wire.latency_seconds * len(self.fragments)


def require_number(key: str, value: float, least: float, most: float) -> None:
    """Raise ValueError unless `value` lies within the bounds; NaN does not."""
    if not least <= value <= most:
        nearest = most if value > most else least
        given = (
            f"{value:g}" if abs(value) < 1e300 or not isinstance(value, int) else "a huge number"
        )
        raise ValueError(f"{key}={given} must be {least:.10g} to {most:.10g}; try {nearest:.10g}")
