"""Training that diverges goes back to the last good checkpoint, in all clusters at one step.

A loss beyond the bounds of the configuration, `patience` times in a row, is posted as a notice,
which takes effect at one step on every rank of every cluster (notices.py). A NonFiniteError is one
that all clusters raise at the same transfer. Both are followed where the step is complete
(rollback.py), a limited number of times; then, or where nothing can go back, the run ends.

What was saved since the first loss beyond the bounds is not gone back to, nor gone on from. By
default the data goes on behind the stretch that training diverged in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from dsx.config.divergence import DivergenceConfig
from dsx.config.files import ConfigError
from dsx.outer.recovery import NonFiniteError
from dsx.training.notices import Notices

_KIND = "diverged"
_WINDOW, _FEWEST = 100, 10  # losses that a median is of


def refuse_stages(config: DivergenceConfig, stages: int) -> None:
    """Raise ConfigError for stages of a pipeline, which apply on their own, and would not agree."""
    if config.max_rollbacks and stages > 1:
        raise ConfigError(
            f"dsx.divergence.max_rollbacks={config.max_rollbacks} is not served with {stages} "
            "pipeline stages, of which each refuses rounds on its own: leave it out; the run ends, "
            "and the next start takes the last good checkpoint"
        )


@dataclass(frozen=True)
class Diverged:
    """Why training goes back, and the step since which nothing that is saved is good."""

    why: str
    since: int


class Divergence:
    """One rank's watch over losses, and what of it has taken effect."""

    def __init__(self, config: DivergenceConfig, notices: Notices) -> None:
        self._config = config
        self._notices = notices
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._in_a_row = 0
        self._since = 0
        self._due: Diverged | None = None
        self._times = 0
        self.bad_since: int | None = None  # while what is trained has diverged

    @property
    def keeps_data(self) -> bool:
        """Whether the data goes on where it is when training goes back."""
        return self._config.data == "go_on"

    @property
    def may_go_back(self) -> bool:
        """Whether the configuration lets training go back at all."""
        return self._config.max_rollbacks > 0

    @property
    def is_exhausted(self) -> bool:
        """Whether training has gone back as often as it may."""
        return self._times >= self._config.max_rollbacks

    @property
    def is_doubtful(self) -> bool:
        """Whether the last loss was beyond a bound."""
        return self._in_a_row > 0

    def counted(self) -> str:
        """Say how often training has gone back."""
        return f"{self._times} of {self._config.max_rollbacks} times"

    def look_at(self, loss: Any, step: int) -> None:
        """Compare a step's loss with the bounds; post it where it has been beyond too often."""
        config = self._config
        if config.max_loss is None and config.max_loss_factor is None:
            return
        value = float(loss)
        bound = math.inf if config.max_loss is None else config.max_loss
        if config.max_loss_factor is not None and len(self._losses) >= _FEWEST:
            bound = min(bound, config.max_loss_factor * median(self._losses))
        if value <= bound and math.isfinite(value):
            self._in_a_row = 0
            self._losses.append(value)
            return
        self._since = self._since if self._in_a_row else step
        self._in_a_row += 1
        if self._in_a_row == config.patience:
            told = "no bound" if bound == math.inf else f"a bound of {bound:g}"
            why = f"its loss is {value:g} at step {step} with {told}, so since step {self._since}"
            self._has_diverged(self._since)
            self._notices.post(_KIND, {"why": why, "since": self._since, "times": self._times})

    def pass_boundary(self, step: int, find_obstacle: Callable[[], str]) -> None:
        """Take up what has been posted; NonFiniteError, on all ranks, where training ends.

        `find_obstacle` says why training cannot go back, or "", and the same on all ranks of all
        clusters.
        """
        posted = [d for d in self._notices.due(_KIND) if d.payload["times"] == self._times]
        if not posted or self._due is not None:
            return
        since = min(due.payload["since"] for due in posted)
        why = f"cluster {posted[0].cluster} has diverged: {posted[0].payload['why']}"
        self._has_diverged(since)
        obstacle = find_obstacle()
        if obstacle or not self.take_up(why, since):
            told = f"; {obstacle}" if obstacle else ""
            raise NonFiniteError(
                f"{why}; all clusters end at step {step}, having gone back {self.counted()} "
                f"(divergence.max_rollbacks){told}: start again from a checkpoint of before step "
                f"{since}, with a lower learning rate or other data"
            )

    def _has_diverged(self, since: int) -> None:
        self.bad_since = since if self.bad_since is None else min(since, self.bad_since)

    def has_gone_back(self) -> None:
        """What is trained is good again."""
        self.bad_since = None

    def take_up(self, why: str, since: int) -> bool:
        """Let training go back where the step is complete; False if it has too often."""
        if self.is_exhausted:
            return False
        self._due = self._due or Diverged(why, since)
        return True

    def take_due(self) -> Diverged | None:
        """Return what to go back for, once."""
        due, self._due = self._due, None
        if due is not None:
            self._times += 1
            self._in_a_row = 0
        return due
