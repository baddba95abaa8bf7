"""Whether what is about to be saved is worth going on from: finite, and no round refused.

The manifest says so for the whole cluster, and a run that takes the newest checkpoint passes over
one of a time of trouble (choice.py): it would meet the same trouble again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from dsx.core.types import History
from dsx.outer.loop import OuterLoop
from dsx.outer.work_space import LONGEST


@torch.no_grad()
def find_trouble(loop: OuterLoop, moments: Iterable[Tensor]) -> str:
    """Say what is wrong on this rank, or nothing: "" where all is in order.

    Looks at masters, outer state and the inner optimizer's `moments`; allocates nothing large.
    """
    told = _of_rounds(loop)
    if told:
        return told
    norms: list[tuple[str, Tensor]] = []
    for fragment in loop.adapter.fragments:
        for start in range(0, fragment.numel, LONGEST):
            local = loop.state.scratch("work", min(LONGEST, fragment.numel - start))
            loop.adapter.read(fragment.id, local, start)
            norms.append(("the masters", _largest(local)))
        for tensor in loop.state.named_state(fragment.id).values():
            if tensor.is_floating_point() and tensor.numel():
                norms.append(("the outer state", _largest(tensor)))
    for tensor in moments:
        if tensor.is_floating_point() and tensor.numel() and not tensor.is_meta:
            norms.append(("the inner optimizer's state", _largest(tensor)))
    if not norms:
        return ""
    finite = torch.stack([norm.isfinite().to("cpu") for _, norm in norms]).tolist()
    wrong = [what for (what, _), is_finite in zip(norms, finite, strict=True) if not is_finite]
    return f"{wrong[0]} at step {loop.history.step}: not finite" if wrong else ""


def tensors_of(optimizers: Iterable[Any]) -> Iterator[Tensor]:
    """Yield what torch's optimizers keep for parameters, on this rank."""
    for optimizer in optimizers:
        kept = cast("Mapping[Any, Any]", getattr(optimizer, "state", {}))
        for entry in kept.values():
            values = cast("Mapping[Any, Any]", entry).values() if isinstance(entry, Mapping) else ()
            for value in values:
                yield from _plain(value) if isinstance(value, Tensor) else ()


def _plain(tensor: Any) -> Iterator[Tensor]:
    """Yield what a tensor is made of on this rank: a shard, codes and scales; itself, if plain."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        yield tensor
        return
    for part in [getattr(tensor, name) for name in flatten()[0]]:
        yield from _plain(part) if isinstance(part, Tensor) else ()  # a DTensor's mesh is none


def _of_rounds(loop: OuterLoop) -> str:
    """Say which rounds are refused, or left out as a cluster takes no steps."""
    history: History = loop.history
    for fragment, (refusals, idle) in enumerate(zip(history.refusals, history.idle, strict=True)):
        name = loop.adapter.stage.name_of(fragment)
        if refusals.in_a_row:
            return f"{name} is refused since step {refusals.since}: values sent are not finite"
        if idle.in_a_row:
            who = ", ".join(f"cluster {m}" for m in idle.because_of)
            return f"{name}: {who} takes no inner steps since step {idle.since}"
    return ""


def _largest(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor, torch.inf)
