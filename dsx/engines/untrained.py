"""Parameters that no optimizer holds: dsx averages what optimizers hold, and nothing else.

One that takes gradients all the same would come apart between clusters, without a word. So it is
refused by name: at the start, and at the step boundary at which one that was frozen no longer is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Untrained:
    """The parameters of a model that are not averaged; ValueError for one that takes gradients."""

    def __init__(self, named: Iterable[tuple[str, Any]], held: Iterable[Any]) -> None:
        known = {id(parameter) for parameter in held}
        self._frozen = [(name, p) for name, p in named if id(p) not in known]
        if name := self._trainable():
            raise ValueError(
                f"no optimizer holds {name}, which can be trained (requires_grad): it would differ "
                "between clusters; give it to an optimizer that dsx knows (attach and "
                "SimulatedClusters take a list of them), or freeze it: requires_grad_(False)"
            )

    def require_frozen(self) -> None:
        """Raise RuntimeError for one that takes gradients now; called at every step boundary."""
        if self._frozen and (name := self._trainable()):
            raise RuntimeError(
                f"{name} was frozen and in no optimizer when dsx was attached, and can be trained "
                "now (requires_grad): it would differ between clusters; keep it frozen, or give it "
                "to an optimizer before dsx is attached"
            )

    def _trainable(self) -> str:
        """Return the first name, and how many there are; empty if there is none."""
        names = [name for name, parameter in self._frozen if parameter.requires_grad]
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"parameter {names[0]}{more}" if names else ""
