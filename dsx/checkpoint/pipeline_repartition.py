"""A pipeline's outer state for other stages: which saved fragments hold what a new one does.

Fragments never cross stages, so a model that is cut into stages anew is cut into other fragments.
What belongs to elements (anchor, outer state, residuals) and to parameters (sizes, warm starts) is
taken from wherever it was saved. What belongs to fragments is made of those that a new one comes
from: counts and steps are the largest of theirs, norms and seconds are measured anew, the period
is the first stage's, and a controller starts anew.

A transfer in flight is a fragment's as a whole: with one under way the state is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dsx.checkpoint.files import SavedCluster, SavedRank
from dsx.core.types import History, ParameterShape
from dsx.outer.loop import OuterLoop

logger = logging.getLogger(__name__)
Cut = Mapping[str, Any]  # by parameter: {"stage": index, "shape": [...]}


@dataclass(frozen=True)
class Origin:
    """A saved fragment: its number within its stage, and the files of that stage's ranks."""

    ranks: Sequence[SavedRank]
    fragment: int

    @property
    def names(self) -> list[str]:
        """Its parameters, in the order of what is kept per parameter."""
        return [name for name, _ in self.ranks[0].meta["kinds"]["parameters"][self.fragment]]


def saved_cut(saved: SavedCluster) -> dict[str, Any]:
    """Return which stage each parameter was trained on, of all stages."""
    return {
        name: {"stage": rank.meta["kinds"]["stage"], "shape": shape}
        for rank in saved.ranks()
        for parameters in rank.meta["kinds"]["parameters"]
        for name, shape in parameters
    }


def own_cut(loop: OuterLoop) -> dict[str, Any]:
    """Return the same for this rank's stage now."""
    stage = [loop.adapter.stage.index, loop.adapter.stage.count]
    return {
        p.name: {"stage": stage, "shape": list(p.shape)}
        for parameters in loop.adapter.fragment_parameters
        for p in parameters
    }


def is_cut_anew(saved: SavedCluster, theirs: Cut, ours: Cut) -> bool:
    """Whether the stages differ; ValueError if the model does.

    `ours` and `theirs` are of all stages.
    """
    absent = {"lacks": ours.keys() - theirs.keys(), "has": theirs.keys() - ours.keys()}
    for what, names in absent.items():
        if names:
            some = ", ".join(sorted(names)[:3])
            raise ValueError(
                f"{saved.directory} belongs to another model: it {what} {some} ({len(names)} in "
                "all). What a tied layer trains beside its tied weights is each stage's own: such "
                "a model goes on with the same pipeline stages only"
            )
    for name in sorted(ours):
        if ours[name]["shape"] != theirs[name]["shape"]:
            raise ValueError(
                f"{saved.directory} belongs to another model: {name} is {theirs[name]['shape']} "
                f"there and {ours[name]['shape']} here"
            )
    return any(ours[name]["stage"] != theirs[name]["stage"] for name in ours)


def require_nothing_in_flight(saved: SavedCluster) -> None:
    """Raise ValueError for transfers of fragments that are not there any more."""
    first_of_stage = {r.meta["kinds"]["stage"][0]: r for r in saved.ranks()}.values()
    entries = [entry for rank in first_of_stage for entry in rank.meta["in_flight"]]
    under_way = sum(not entry["is_empty"] for entry in entries)
    if under_way:
        raise ValueError(
            f"{saved.directory} holds {under_way} transfer(s) in flight, of fragments that do not "
            "exist in these pipeline stages: load it with the stages it was saved with, call "
            "engine.dsx.finish(), which applies them, save, and resume from that"
        )


def find_origins(
    saved: SavedCluster, fragments: Sequence[Sequence[ParameterShape]]
) -> list[list[Origin]]:
    """Return, for each fragment now, the saved ones that hold any of its parameters."""
    stages: dict[int, list[SavedRank]] = {}
    for rank in saved.ranks():
        stages.setdefault(rank.meta["kinds"]["stage"][0], []).append(rank)
    everything = [
        Origin(stages[stage], index)
        for stage in sorted(stages)
        for index in range(len(stages[stage][0].meta["kinds"]["parameters"]))
    ]
    wanted = [{p.name for p in parameters} for parameters in fragments]
    return [[o for o in everything if not names.isdisjoint(o.names)] for names in wanted]


def merged_history(loop: OuterLoop, origins: Sequence[Sequence[Origin]]) -> History:
    """Return the clock for new fragments; the same in every cluster, as the saved ones were."""
    merged = History(len(origins), list(loop.adapter.fragment_numel))
    histories: list[History] = []
    for fragment, held in enumerate(origins):
        old = [(History.from_state_dict(o.ranks[0].meta["history"]), o.fragment) for o in held]
        histories += [history for history, _ in old]
        for counts in ("launched", "applied", "launches", "rounds", "intervals"):
            getattr(merged, counts)[fragment] = max(getattr(h, counts)[p] for h, p in old)
    merged.step = histories[0].step
    merged.step_seconds = max((h.step_seconds or 0.0 for h in histories), default=0.0) or None
    merged.plan = histories[0].plan
    if rungs := histories[0].guard.get("rungs"):  # the same in all stages
        merged.guard = {"rungs": rungs}
    if any(history.decisions for history in histories):
        logger.warning(
            "the pipeline stages are cut anew: what dsx.control had measured starts anew, from "
            "its first settings"
        )
    return merged
