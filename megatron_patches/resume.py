"""Which iteration `--load` means: the newest good one, of dsx's outer state and Megatron's part.

Megatron takes what its `latest_checkpointed_iteration.txt` names. Where the outer state of that
iteration is damaged, not finite, or lacking in a cluster, all clusters take an earlier one, by
Megatron's own `--ckpt-step`, before the model is built. `--ckpt-step` of a user's is left alone.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from dsx.engines.resume_point import choose
from megatron_patches.run import Run

_TRACKER = "latest_checkpointed_iteration.txt"


def choose_iteration(run: Run, arguments: Any) -> None:
    """Set `--ckpt-step` where the last iteration is not good. Collective over all clusters.

    ValueError names the flags where outer state is there, and none of it is good.
    """
    gather = partial(run.world.rendezvous.gather, "resume point")
    named = getattr(arguments, "ckpt_step", None)
    is_new = not arguments.load or getattr(arguments, "finetune", False)
    latest = None if named or is_new else _latest(Path(arguments.load))
    everyone = gather(latest)
    if any(iteration is None for iteration in everyone):
        return  # nothing to choose: what does not fit is told when it is loaded
    load = Path(arguments.load)

    def has_megatrons(tag: str) -> str | None:
        number = tag.removeprefix("iter_").split(".")[0]
        if not number.isdigit() or int(number) > int(latest or 0) or not (load / tag).is_dir():
            return f"{load} has no complete checkpoint of Megatron's {tag}"
        return None

    try:
        _, tag = choose(gather, run.world, load / "dsx", None, also=has_megatrons)
    except FileNotFoundError:
        return  # no outer state: told with what to do where it is loaded
    except ValueError as error:
        raise ValueError(f"--load {load}: {error} (here: --ckpt-step)") from None
    iteration = int(tag.removeprefix("iter_").split(".")[0])
    if iteration != latest:
        arguments.ckpt_step = iteration
        run.tell(f"goes on from iteration {iteration}, not {latest}, which is not good everywhere")


def _latest(load: Path) -> int | None:
    """Return the iteration that Megatron would load; None if there is none, or a release."""
    try:
        text = (load / _TRACKER).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
