"""Where training is in the data that all clusters share, and in a run without dsx before them.

Megatron counts `consumed_train_samples` by the batches of its own world, one cluster's. All
clusters together read C times as many. What the samplers begin at, and what Megatron's checkpoint
says, is the place in the data: so plain Megatron goes on behind what all clusters have read, and
clusters go on behind what plain Megatron has read. A cluster's own count is in the outer state.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import Any


class Place:
    """The place in the data by a cluster's own count; its position travels with a checkpoint."""

    def __init__(self) -> None:
        self.counted = 0  # by this cluster, at the save that is under way
        self.parts = 1  # into how many the samples of all clusters are divided
        self._begun = (0, 0)
        self._saved: dict[str, Any] | None = None

    def of(self, counted: int, parts: int | None = None) -> int:
        """Return the place of a cluster's own count."""
        own, place = self._begun
        return place + (self.parts if parts is None else parts) * (counted - own)

    @property
    def begun(self) -> tuple[int, int]:
        """The own count from which clusters count, and the place in the data then."""
        return self._begun

    @property
    def counted_before(self) -> int:
        """What a run without dsx had counted, or clusters of another number."""
        return self._begun[0]

    def begin(self, parts: int, counted: int, place: int) -> None:
        """Count from here on, for so many parts."""
        self.parts, self._begun = parts, (counted, place)

    @property
    def saved_parts(self) -> int | None:
        """Into how many the samples were divided at the save; None if that is not known."""
        return None if self._saved is None else self._saved["parts"]

    def go_on(self, parts: int, counted: int, is_own: bool = False) -> int:
        """Go on where a checkpoint was, if one was loaded; return the cluster's own count.

        `counted` is what Megatron's checkpoint says, which is the own count in those that hold no
        place. Data that is each cluster's own now (`is_own`), and was shared, begins there, too:
        what other clusters have read is not of it.
        """
        saved, self.parts = self._saved, parts
        if saved is None:
            return counted
        if saved["parts"] == parts:
            self._begun = saved["begun"][0], saved["begun"][1]
        else:
            self._begun = saved["counted"], saved["counted" if is_own else "place"]
        return saved["counted"]

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as the outer state keeps it."""
        place = self.of(self.counted)
        state = {"counted": self.counted, "place": place}
        return {**state, "begun": list(self._begun), "parts": self.parts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a position, which is gone to once the data is known (`go_on`)."""
        self._saved = state_dict

    @contextlib.contextmanager
    def saving(self, arguments: Any) -> Generator[None]:
        """Let Megatron's checkpoint hold the place in the data, and the outer state the count."""
        self.counted = arguments.consumed_train_samples
        arguments.consumed_train_samples = self.of(self.counted)
        try:
            yield
        finally:
            arguments.consumed_train_samples = self.counted
