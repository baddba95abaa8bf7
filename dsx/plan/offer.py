"""A candidate as what one starts a run with: the "dsx" block, and the same as Megatron's flags."""

from __future__ import annotations

import json
import math
from typing import Any

from dsx.plan.candidates import Candidate, Question

OWN_LEAST_INTERVAL = 8  # of dilocox's control, unless the block says otherwise
OWN_DEADLINE = 600.0  # seconds; clusters.deadline_seconds, unless the block says otherwise
_PATIENCE = 3  # a swap may share the line with all of a round, and the first rounds may be larger


def block_of(candidate: Candidate, question: Question) -> dict[str, Any]:
    """Return the "dsx" block; sections that the preset already has are left out."""
    recipe, settings = candidate.recipe, candidate.settings
    clusters: dict[str, Any] = {"num_clusters": question.num_clusters}
    deadline = math.ceil(_PATIENCE * candidate.prediction.transfer_seconds / 100) * 100
    if deadline > OWN_DEADLINE:
        clusters["deadline_seconds"] = deadline
    block: dict[str, Any] = {
        "preset": candidate.preset,
        "clusters": clusters,
        "schedule": {"interval": settings.interval},
    }
    if recipe.fragment_counts:
        block["fragments"] = {
            "num_fragments": candidate.num_fragments,
            "pattern": recipe.pattern,
        }
    if recipe.is_overlapped:
        block["delay"] = {"steps": settings.overlap_steps}
    if candidate.codec.block:
        block["compression"] = dict(candidate.codec.block)
    if recipe.is_low_rank:
        rank = settings.coding.rank
        block["control"] = {"rank": rank, "max_rank": rank}
        if settings.interval < OWN_LEAST_INTERVAL:
            block["control"]["min_interval"] = settings.interval
    if question.streams > 1:
        block["link"] = {"streams": question.streams}
    if candidate.is_state_on_host:
        block["state"] = {"device": "host"}
    return block


def flags_of(block: dict[str, Any]) -> str:
    """Return the block as flags, in one line."""
    words: list[str] = []
    for section, value in block.items():
        if not isinstance(value, dict):
            words += [f"--dsx-{section}", str(value)]
            continue
        for key, leaf in value.items():
            name = key if section == "clusters" else f"{section}-{key}"
            text = leaf if isinstance(leaf, str) else json.dumps(leaf)
            words += [f"--dsx-{name.replace('_', '-')}", text]
    return " ".join(words)
