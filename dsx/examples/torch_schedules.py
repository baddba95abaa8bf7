"""Learning rate schedules of torch, named in a DeepSpeed JSON: CyclicLR, as CO2 has it.

Source: CO2 (arXiv:2401.16265, A.3.6), which compares CyclicLR with a cosine. DeepSpeed hands a
schedule that its JSON names the optimizer that ZeRO has wrapped, which those of torch refuse; a
function that makes the schedule gets the optimizer inside.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deepspeed.runtime import lr_schedules
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler


def take_torch_schedule(config: dict[str, Any]) -> Callable[[Optimizer], LRScheduler] | None:
    """Take a schedule of torch out of a DeepSpeed JSON; return what makes it, if one is there.

    ValueError for a name that neither DeepSpeed nor torch has.
    """
    name = config.get("scheduler", {}).get("type")
    if name is None or name in lr_schedules.VALID_LR_SCHEDULES:
        return None
    kind = getattr(lr_scheduler, name, None)
    if not (isinstance(kind, type) and issubclass(kind, LRScheduler)):
        known = ", ".join(lr_schedules.VALID_LR_SCHEDULES)
        raise ValueError(
            f"scheduler.type={name!r} is neither of DeepSpeed ({known}) nor of "
            "torch.optim.lr_scheduler; try WarmupCosineLR, or CyclicLR"
        )
    return partial(kind, **config.pop("scheduler").get("params", {}))
