"""Positions that travel with a checkpoint: of the data, and of whatever a script tracks.

They are also told to a cluster that joins a run that goes on: by one rank at a boundary of its own,
so without a word to other ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

logger = logging.getLogger(__name__)
DATA_POSITION = "dsx.training_data"  # the position in `dsx.initialize(training_data=...)`
SAMPLES = "dsx.samples"  # the place in Megatron-LM's training data, of all clusters together
_OF_DSX = {DATA_POSITION, SAMPLES}


class Resumable(Protocol):
    """Anything whose position travels with a checkpoint, as JSON values.

    While a cluster heals it is asked at each boundary, on each rank alone: unless `place_here` is
    there, too, it must not wait for other ranks.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Go back to a position."""
        ...


class FollowsOthers(Protocol):
    """What tells a cluster that joins where this one is otherwise than a checkpoint."""

    def place_here(self) -> dict[str, Any]:
        """Return this rank's place as of the boundary being passed. Not collective."""
        ...

    def go_where_others_are(self, place: dict[str, Any]) -> None:
        """Go to the place of another cluster's rank of this number."""
        ...


def place_here(one: Resumable | FollowsOthers) -> dict[str, Any]:
    """Return what a cluster that joins is told of it."""
    own: Any = getattr(one, "place_here", None)
    return own() if own is not None else cast(Resumable, one).state_dict()


def go_where_others_are(one: Resumable | FollowsOthers, place: dict[str, Any]) -> None:
    """Bring it to what another cluster has told."""
    own: Any = getattr(one, "go_where_others_are", None)
    (own if own is not None else cast(Resumable, one).load_state_dict)(place)


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
