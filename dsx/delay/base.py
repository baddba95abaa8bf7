"""The contract of a delay policy, and the blocking one.

Source: DiLoCo (arXiv:2311.08105, Alg. 1): wait for the mean, step the anchor, restart every
cluster from it. A policy answers three questions: is a transfer ripe, which pseudo-gradient does
the outer optimizer see, and what do the inner parameters become. Policies are frozen and
stateless; everything they see arrives in the `SyncView`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from dsx.types import SyncView


class DelayPolicy(Protocol):
    """Pure decisions about one transfer; `steps` is tau, the overlap in inner steps."""

    @property
    def steps(self) -> int:
        """Inner steps between launch and apply."""
        ...

    @property
    def needs_local(self) -> bool:
        """Whether `merge` reads the inner parameters as they are at apply time."""
        ...

    @property
    def export(self) -> Literal["anchor", "mean"]:
        """What a finished run hands out: the drained anchor, or the mean of the clusters."""
        ...

    def validate(self, interval: int) -> None:
        """Raise ValueError if the overlap does not fit H = `interval`."""
        ...

    def is_ripe(self, age: int, newer: int) -> bool:
        """Decide from steps since launch and launches of the same fragment since then."""
        ...

    def outer_grad(self, view: SyncView) -> Tensor:
        """Return the pseudo-gradient for the outer step; may be `view.mean` itself."""
        ...

    def merge(self, view: SyncView) -> Tensor:
        """Return the new inner parameters, computed in place in `view.local` where it is given."""
        ...


@dataclass(frozen=True)
class Replace:
    """Blocking: apply in the step of the launch, `local = anchor`."""

    @property
    def steps(self) -> int:
        """No overlap."""
        return 0

    @property
    def needs_local(self) -> bool:
        """The anchor replaces whatever was there."""
        return False

    @property
    def export(self) -> Literal["anchor", "mean"]:
        """The anchor is the model."""
        return "anchor"

    def validate(self, interval: int) -> None:
        """Accept every interval."""

    def is_ripe(self, age: int, newer: int) -> bool:
        """At once."""
        return True

    def outer_grad(self, view: SyncView) -> Tensor:
        """Return the plain mean."""
        return view.mean

    def merge(self, view: SyncView) -> Tensor:
        """Return the anchor."""
        return view.anchor
