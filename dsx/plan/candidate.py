"""One way of running that a plan considers."""

from __future__ import annotations

from dataclasses import dataclass

from dsx.method.method import Method
from dsx.outer.memory import OuterMemory
from dsx.plan.predict import Prediction
from dsx.plan.traffic import initial_rank
from dsx.plan.variants import Codec


@dataclass(frozen=True)
class Candidate:
    """One way of running; `num_fragments` are of each pipeline stage.

    `contributions` are the bytes that one boundary's launches take, where outer state is.
    """

    preset: str
    codec: Codec
    num_fragments: int
    method: Method
    prediction: Prediction
    memory: OuterMemory
    contributions: int
    is_state_on_host: bool
    is_fitting: bool
    coding_cores: int | None = None  # that the plan has chosen

    @property
    def interval(self) -> int:
        """H."""
        return self.method.schedule.interval

    @property
    def overlap_steps(self) -> int:
        """Return tau, a number also where the run goes by what it measures."""
        steps = self.method.delay.steps
        assert steps != "auto"
        return steps

    @property
    def rank(self) -> int | None:
        """Return the rank of factors, None without any."""
        return initial_rank(self.method)

    @property
    def bytes_per_day(self) -> float:
        """What one cluster sends in a day."""
        return self.prediction.bytes_per_round * 86400 / self.prediction.round_seconds

    @property
    def on_device(self) -> int:
        """Bytes of outer training on the accelerator."""
        return bytes_on_device(self.memory, self.contributions, self.is_state_on_host)

    @property
    def on_host(self) -> int:
        """Bytes of outer training in host memory."""
        return self.memory.on_host("host" if self.is_state_on_host else "masters")


def bytes_on_device(memory: OuterMemory, contributions: int, is_on_host: bool) -> int:
    """Return the bytes of outer training on the accelerator."""
    return 0 if is_on_host else memory.on_device("masters") + contributions
