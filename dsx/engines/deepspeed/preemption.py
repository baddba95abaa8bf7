"""What a DeepSpeed engine does when its run is told to end: `engine.save_checkpoint`, and the end.

The boundary lies inside the step, in the optimizer's hook: the step is complete, its learning rate
and counters included, once `engine.step` or, with a pipeline, `engine.train_batch` returns.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.engines.end_of_script import settle_before_backward
from dsx.training.handle import Handle

logger = logging.getLogger(__name__)


class EndOfEngine:
    """How an engine saves where its run is told to end."""

    needs_callback, ends_elsewhere, saves_when_asked = False, False, True

    def __init__(self, engine: Any, handle: Handle) -> None:
        self._engine = engine
        self._handle = handle
        self._is_told = False
        self.write: Callable[..., object] = engine.save_checkpoint  # of dsx, once it is replaced

    def save(self, base: Path, tag: str) -> Path:
        """Save as `engine.save_checkpoint` does; return the tag's directory. OSError if not."""
        self.write(str(base), tag=tag)
        return base / f"cluster_{self._handle.cluster_id}" / tag

    def script_state(self, directory: Path, client_state: Any) -> dict[str, Any]:
        """Return the client_state of a save: the callback's, where the run is told to end."""
        preemption = self._handle.preemption
        if preemption.is_saving or preemption.asked_saves.is_saving:
            return preemption.script_state(directory)
        if client_state and not preemption.callback and not self._is_told:
            self._is_told = True
            logger.warning(
                "this script keeps %s in client_state: told to end by a signal, dsx saves without; "
                "return them from a callback, handle.on_preemption(lambda directory: {...})",
                ", ".join(sorted(map(str, client_state))),
            )
        return dict(client_state or {})


def end_when_told(engine: Any, handle: Handle) -> EndOfEngine:
    """Let the run save and end by itself, behind a step, where it is told to."""
    preemption = handle.preemption
    preemption.engine = end = EndOfEngine(engine, handle)

    def around(take: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(take)
        def taken(*args: Any, **kwargs: Any) -> Any:
            preemption.begin_step()
            settle_before_backward(handle)
            result = take(*args, **kwargs)
            if preemption.engine is end:  # unless a loop around the engine knows better
                preemption.end_if_due()
            handle.rollback.go_back_if_due()
            return result

        return taken

    pipeline = engine.pipeline_parallelism
    for name in ("train_batch", "eval_batch") if pipeline else ("forward", "step"):
        setattr(engine, name, around(getattr(engine, name)))
    return end
