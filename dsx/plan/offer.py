"""A candidate as what one starts a run with: the "dsx" block, and the same as Megatron's flags."""

from __future__ import annotations

import json
import math
from typing import Any

from dsx.method.choices import PRESETS
from dsx.method.fragments import ByLayer
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question

OWN_DEADLINE = 600.0  # seconds; clusters.deadline_seconds, unless the block says otherwise
_PATIENCE = 3  # one may share the link with all of a round, and the first rounds may be larger


def block_of(candidate: Candidate, question: Question) -> dict[str, Any]:
    """Return the "dsx" block; sections that the preset already has are left out."""
    method, codec = candidate.method, candidate.codec
    clusters: dict[str, Any] = {"num_clusters": question.num_clusters}
    deadline = math.ceil(_PATIENCE * candidate.prediction.transfer_seconds / 100) * 100
    if deadline > OWN_DEADLINE:
        clusters["deadline_seconds"] = deadline
    block: dict[str, Any] = {
        "preset": candidate.preset,
        "clusters": clusters,
        "schedule": {"interval": candidate.interval},
    }
    if isinstance(method.fragments, ByLayer):
        pattern = method.fragments.pattern
        block["fragments"] = {"num_fragments": candidate.num_fragments, "pattern": pattern}
    preset = PRESETS[candidate.preset](question.num_clusters)
    gamma = getattr(method.schedule, "gamma", None)  # of adaptive transmission
    if gamma != getattr(preset.schedule, "gamma", None):
        block["schedule"]["gamma"] = gamma
    if method.delay.steps and not preset.delay.uses_seconds:
        block["delay"] = {"steps": method.delay.steps}
    if codec.block:
        block["compression"] = dict(codec.block)
    if codec.rank is not None:
        block["control"] = {"rank": codec.rank, "max_rank": codec.rank}
    least = method.control.lowest_interval(method.sync_params)
    if least < preset.control.lowest_interval(method.sync_params):
        block.setdefault("control", {})["min_interval"] = least
    if question.streams > 1:
        block["link"] = {"streams": question.streams}
    # chosen without knowing what a rank has, it would end runs of hosts with fewer, and cap others
    is_bounded = question.cores_beside is not None
    cores = candidate.coding_cores if is_bounded else question.coding_cores
    if cores is not None:
        block["coding"] = {"cores": cores}
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
