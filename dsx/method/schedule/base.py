"""The contract of a schedule: which fragments are launched at which inner step.

It decides from values that are equal on every rank of every cluster, so that all launch the same.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Protocol

from annotated_types import Ge

from dsx.core.checks import require_bounds
from dsx.core.registry import contract
from dsx.core.types import BackwardTrigger, History, Stage, SyncParams

Interval = Annotated[int, Ge(1)]


@contract("schedule")
class Schedule(Protocol):
    """Decides from values that are equal on every rank; a new one says `interval` and `due`.

    - `interval`: H in inner steps, the value the first sync parameters carry;
    - `when`: whether what is due is launched inside the backward, with the parameters before or
      after this step's update; None: at the step boundary;
    - `backwards`: the backward passes of one inner step (micro-batches); 1 if it never matters;
    - `takes_turns`: whether the stages of a pipeline send one after another;
    - `uses_norms`: whether it decides from the norms of the means.
    """

    interval: int
    when: BackwardTrigger | None = None
    backwards: int = 1
    takes_turns: bool = False
    uses_norms: bool = False

    @property
    def uses_seconds(self) -> bool:
        """Whether it decides from measured times, which then travel with the transfers."""
        return False

    def validate(self, num_fragments: int | None) -> None:
        """Raise ValueError unless H >= 1 and it can serve that many fragments (None: not known)."""
        require_bounds("schedule", self)

    @abstractmethod
    def due(
        self, step: int, history: History, sync_params: SyncParams, stage: Stage
    ) -> Sequence[int]:
        """Return the fragments to launch at boundary `step`, in launch order."""
        ...

    def advance(self, history: History, sync_params: SyncParams) -> None:
        """Take note of what changed by the boundary just passed, in `history.plan`, in place.

        Called once before training and after the applies of every boundary.
        """


def require_step_per_fragment(num_fragments: int | None, interval: int, kind: str) -> None:
    """Raise ValueError unless P <= H."""
    if num_fragments is not None and num_fragments > interval:
        raise ValueError(
            f"fragments.num_fragments={num_fragments} does not fit schedule.interval="
            f"{interval}: a schedule of type {kind!r} needs one inner step per fragment "
            f"or more; use num_fragments <= {interval} or interval >= {num_fragments}"
        )
