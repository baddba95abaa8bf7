"""A save of Megatron's own that fails in its midst: known on all ranks, or an end of the run.

Where a rank cannot write its shards (a disk that has become full), core 0.14 and later gather that
and raise torch's `CheckpointException` on every rank, behind the last collective of that save. Then
nothing is saved at that iteration, all ranks go on, and a line says so. What one rank alone raises
(the small file that the first one writes, the formats before `torch_dist`, all of core 0.13) finds
the others waiting inside Megatron, where nobody can reach them: it ends the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.checkpoint.keep import remove_tag
from dsx.engines.agreed_save import is_of_disk
from dsx.engines.megatron.own_part import latest_iteration, tag_of
from megatron_patches.run import Run


def survives(
    run: Run, iteration: int, directory: Path, states: Path, save: Callable[[], Any]
) -> tuple[bool, Any]:
    """Save; return whether that is done, and what it has returned. Collective in the cluster.

    What is no matter of a disk on some rank is raised on all.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        result, failed = save(), None
    except CheckpointException as error:
        result, failed = None, error
    told = None if failed is None else _why(failed)
    everyone = run.world.in_cluster().gather("whether Megatron has saved", told)
    if not any(one is not None for one in everyone):
        return True, result
    others = [why for one in everyone if one for why in one["others"]]
    if others or any(one is None for one in everyone):
        raise failed or RuntimeError(f"iteration {iteration} is not saved: {'; '.join(others)}")
    handle = run.handle
    assert handle is not None
    why = "; ".join([why for one in everyone if one for why in one["of_disk"]][:4])
    if run.world.rank == 0:
        handle.beside.settle()  # the outer state may be under way
        _remove(run, iteration, directory, states)
    handle.not_saved(
        states / tag_of(iteration),
        f"iteration {iteration} is not saved: {why}; what was saved before is as it was, and "
        "training goes on: free some space, or save elsewhere",
        was_entered=True,
    )
    return False, None


def _why(error: Any) -> dict[str, list[str]]:
    """Return what has failed on which rank; the first rank alone knows."""
    found: dict[str, list[str]] = {"of_disk": [], "others": []}
    for rank, (cause, _) in error.failures.items():
        kind = "of_disk" if _is_of_disk(cause) else "others"
        found[kind].append(f"rank {rank}: {str(cause).splitlines()[0]}")
    return found


def _is_of_disk(error: BaseException) -> bool:
    """Whether an error is one of writing; of a process that writes for a rank its text is left."""
    return "[Errno " in str(error) or (isinstance(error, Exception) and is_of_disk(error))


def _remove(run: Run, iteration: int, directory: Path, states: Path) -> None:
    """Delete what is there of it, unless Megatron names it, as of an earlier save."""
    try:
        if (states / tag_of(iteration)).is_dir():
            remove_tag(states, tag_of(iteration))
        if latest_iteration(directory) != iteration:
            shutil.rmtree(directory / tag_of(iteration), ignore_errors=True)
    except OSError as error:
        run.tell(f"what was begun of iteration {iteration} stays: {error}")
