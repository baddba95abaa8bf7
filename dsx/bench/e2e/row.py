"""A line of the table of `dsx bench e2e`: what was measured of a method on a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Row:
    """One line of the table: a method on a line. Bytes are of the cluster that sends most.

    Medians of blocks: `utilization`, the ceiling's step over the measured one; `step_seconds` and
    `tokens_per_second`; `exposed_seconds`, what a period of `interval` steps takes beyond its
    compute; `wait_seconds`, in which training waited for other clusters in that period, as counted
    by dsx: what is exposed beyond it is CPU that the network takes, and the machine's own drift;
    `transfer_seconds`, those of the period's transfers. `utilization_spread` is half of what lies
    between the lowest and the highest block; `block_utilizations`, `block_overlaps` have them all.
    `wait_half_range` is that of `wait_seconds`. `transport` and `security`: what moved messages.
    `speedup` is over all-reduce at the ceiling without communication. `wire_bytes` is the kernel's
    count, headers included; `payload_bytes` the library's own, `planned_bytes` the planner's for
    all rounds: None where DeepSpeed counts none, and where a method sends as much as what it
    measures tells it to.
    """

    ratio: float
    megabits_per_second: float
    shape: str
    method: str
    interval: int
    delay_steps: int | Literal["auto"]
    steps: int
    is_overlapped: bool
    step_seconds: float
    ceiling_seconds: float
    tokens_per_second: float
    utilization: float
    predicted_utilization: float
    exposed_seconds: float
    wire_bytes: int
    payload_bytes: int | None
    planned_bytes: int | None
    validation_loss: float
    speedup: float = 1.0
    utilization_spread: float = 0.0
    wait_seconds: float | None = None
    latency_milliseconds: float = 0.0
    block_utilizations: tuple[float, ...] = ()
    block_overlaps: tuple[float, ...] = ()
    transfer_seconds: float | None = None
    transport: str = "gloo"
    security: str = "none"
    wait_half_range: float | None = None

    @property
    def name(self) -> str:
        """The method, and over what if that is not gloo."""
        return self.method if self.transport == "gloo" else f"{self.method}, {self.kind}"

    @property
    def kind(self) -> str:
        """Over what."""
        return f"{self.transport}/{self.security}"
