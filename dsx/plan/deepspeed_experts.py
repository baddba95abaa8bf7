"""Experts of DeepSpeed's `MoE` in a plan: their names, and over how many ranks they lie.

A layer that has some is taken to be `mlp.moe`, a `deepspeed.moe.layer.MoE`, with a shared expert
beside it. Every expert has its number in the layer, as in a run. A script tells their ranks to
`MoE(ep_size=...)`, so DeepSpeed's JSON does not: `"moe": {"ep_size": 8}` there says it to a plan,
a key that DeepSpeed takes and does not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dsx.core.types import ParameterShape
from dsx.plan.gpt_shapes import Weight

MOST_IN_GROUP = 178956971  # elements: split_params_into_different_moe_groups_for_optimizer's
_ROUTER, _EXPERTS = "mlp.router.weight", "mlp.experts.local_experts."
GATE, NUMBERED = "mlp.moe.deepspeed_moe.gate.wg.weight", "deepspeed_experts."
_NUMBERED = f"mlp.moe.deepspeed_moe.experts.{NUMBERED}"
_NUMBER = re.compile(rf"{re.escape(NUMBERED)}(\d+)\.")


def named_as_deepspeed(weights: Sequence[Weight]) -> list[Weight]:
    """Return weights of a GPT, those of routers and experts by DeepSpeed's names."""
    return [
        replace(w, name=w.name.replace(_ROUTER, GATE).replace(_EXPERTS, _NUMBERED)) for w in weights
    ]


def number_of(name: str) -> int:
    """Return an expert's number in its layer."""
    match = _NUMBER.search(name)
    assert match is not None, f"{name} is no expert's"
    return int(match[1])


def in_groups(shapes: Sequence[ParameterShape]) -> Iterator[Sequence[ParameterShape]]:
    """Yield a rank's experts as DeepSpeed splits them into an optimizer's groups, by size."""
    group: list[ParameterShape] = []
    numel = 0
    for shape in shapes:
        if group and numel + shape.numel > MOST_IN_GROUP:
            yield group
            group, numel = [], 0
        group.append(shape)
        numel += shape.numel
    if group:
        yield group
