"""The line of one cluster, and what coding costs: what a transfer's seconds are made of.

A line is given by its raw rate, as a network card, a provider or `tc tbf` counts: Ethernet frames.
A frame of 1514 bytes carries 1448 of payload at an MTU of 1500: 14 of Ethernet, 20 of IPv4, 20 of
TCP and 12 of its timestamps are not. Acknowledgements go the other way, about one per two frames,
and are left out, as are retransmissions and the first round trips in which TCP finds its window.

An exchange round takes `ROUND_ONE_WAYS` latencies, not one: a receive is announced to its sender,
and gloo sends what was asked for. A dense transfer is three rounds (handshake, two of the mean),
its sideband two more; between two clusters a mean is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from dsx.plan.published.scenario import require_number

ROUND_ONE_WAYS = 2
FRAME_BYTES, FRAME_PAYLOAD_BYTES = 1514, 1448
PAYLOAD_SHARE = FRAME_PAYLOAD_BYTES / FRAME_BYTES
_MEMCPY = 6.9e9  # bytes per second, of a cloud machine: less than where the kernels were measured
_PERCENT = {  # of memcpy, by docs/compression.md: encode, decode, encode with feedback
    "bf16": (102, 115, 37),
    "fp16": (72, 115, 31),
    "int8": (108, 149, 69),
    "int4": (129, 136, 75),
    "fp8": (96, 140, 43),
    "fp4_e2m1": (40, 117, 40),
    "fp4_e3m0": (29, 123, 23),
    "ternary": (51, 141, 42),
    "3bit": (65, 54, 52),
    "2bit": (80, 158, 67),
    "1bit": (95, 166, 63),
}


def wire_bytes(payload: float) -> float:
    """Return what a line counts for so many bytes of payload in full frames."""
    return payload / PAYLOAD_SHARE


@dataclass(frozen=True)
class Link:
    """A cluster's line to the others: each way at once, shared by all of its ranks.

    `bits_per_second` is the raw rate, of which `payload_share` is payload; 1 for a rate that was
    measured in payload. `latency_seconds` is one way.
    """

    bits_per_second: float
    latency_seconds: float = 0.0
    payload_share: float = PAYLOAD_SHARE

    def __post_init__(self) -> None:
        require_number("bits_per_second", self.bits_per_second, 1, 1e18)
        require_number("latency_seconds", self.latency_seconds, 0, 1e6)
        require_number("payload_share", self.payload_share, 1e-3, 1)

    @property
    def payload_bytes_per_second(self) -> float:
        """What is left for tensors."""
        return self.bits_per_second * self.payload_share / 8


@dataclass(frozen=True)
class CodecSpeeds:
    """Of one format: bytes of fp32 per second on one thread, as `dsx bench codec` counts."""

    encode: float
    decode: float
    encode_with_feedback: float

    def slower(self, slowdown: float) -> CodecSpeeds:
        """Return those at which everything takes `slowdown` times as long."""
        return CodecSpeeds(
            self.encode / slowdown, self.decode / slowdown, self.encode_with_feedback / slowdown
        )


def _of_readme() -> dict[str, CodecSpeeds]:
    return {
        name: CodecSpeeds(*(_MEMCPY * percent / 100 for percent in percents))
        for name, percents in _PERCENT.items()
    }


@dataclass(frozen=True)
class Costs:
    """What one core does beside the line; the defaults are those of docs/compression.md.

    `copy_bytes_per_second`: of sums and hashes of fp32; `flops`: of the products of low-rank
    factors, per second on one rank's host; `blocking_seconds_per_element`: what the training thread
    itself spends on an element at launch and apply together, which no overlap hides
    (launch_cost.py); 0 where it is none of the question. `cores` are those of a rank's coding
    threads (`coding.cores`); None: one for each transfer under way. `is_of_run`: a run has measured
    the training thread's, and codes are in it where training waits for them.
    """

    formats: Mapping[str, CodecSpeeds] = field(default_factory=_of_readme)
    copy_bytes_per_second: float = _MEMCPY
    flops: float = 5e10
    blocking_seconds_per_element: float = 0.0
    is_of_run: bool = False
    cores: int | None = None

    def slower(self, slowdown: float) -> Costs:
        """Return those of cores that take `slowdown` times as long to code; training's stay."""
        return replace(
            self,
            formats={name: speeds.slower(slowdown) for name, speeds in self.formats.items()},
            copy_bytes_per_second=self.copy_bytes_per_second / slowdown,
            flops=self.flops / slowdown,
        )


def read_codec_figures(figures: Any) -> Costs:
    """Read what `dsx bench codec --json` wrote, of the host's figures; others stay as they are.

    ValueError for anything else.
    """
    formats, memcpy = _of_readme(), _MEMCPY
    try:
        for figure in figures:
            if figure["device"] == "cpu":
                keys = ("encode", "decode", "encode_ef")
                speeds = [1e9 * float(figure[f"{key}_gb_per_second"]) for key in keys]
                for speed in speeds:
                    require_number("bytes per second", speed, 1, 1e18)
                formats[figure["format"]] = CodecSpeeds(*speeds)
                memcpy = 1e9 * float(figure["memcpy_gb_per_second"])
                require_number("bytes per second", memcpy, 1, 1e18)
    except (KeyError, TypeError, OverflowError, ValueError) as error:
        raise ValueError(
            f"codec figures must be a list of objects with format, device and GB/s ({error}); "
            "write it by dsx bench codec --json"
        ) from None
    return Costs(formats, memcpy)
