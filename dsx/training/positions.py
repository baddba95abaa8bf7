"""Positions that travel with a checkpoint: of the data, and of whatever a script tracks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

logger = logging.getLogger(__name__)
DATA_POSITION = "dsx.training_data"  # the position in `dsx.initialize(training_data=...)`
SAMPLES = "dsx.samples"  # the place in Megatron-LM's training data, of all clusters together
_OF_DSX = {DATA_POSITION, SAMPLES}


class Resumable(Protocol):
    """Anything whose position travels with a checkpoint, as JSON values."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to a position."""
        ...


def restore_positions(
    tracked: Mapping[str, Resumable],
    saved: Mapping[str, Any],
    directory: Path,
    is_other_number: bool,
) -> None:
    """Bring what is tracked to where it was; ValueError if something has no position there.

    With another number of clusters (`is_other_number`) an object that refuses its position starts
    anew, and a warning says so.
    """
    states = dict(saved)
    if DATA_POSITION not in states and DATA_POSITION in tracked:
        logger.warning("%s has no position in training_data: it starts anew", directory)
    for name in _OF_DSX - set(tracked):
        states.pop(name, None)  # a loader of the script's own reads now
    if set(states) != set(tracked) - (_OF_DSX - set(states)):
        raise ValueError(
            f"{directory} tracks {sorted(states)}, this run {sorted(tracked)}: call "
            "track() with the same names before load_checkpoint()"
        )
    for name, state in states.items():
        try:
            tracked[name].load_state_dict(state)
        except ValueError as error:
            if not is_other_number:
                raise
            logger.warning("%r starts anew, as the number of clusters differs: %s", name, error)
