"""A DeepSpeed engine whose cluster joins a run that goes on: its counters come to where that is."""

from __future__ import annotations

from typing import Any

from dsx.training.handle import Handle


def follow_joined(engine: Any, handle: Handle) -> None:
    """Have the engine's counters and its learning rate follow, once the cluster has healed.

    The inner optimizer's states begin anew: they belong to no step of the others.
    """

    def on_joined() -> None:
        before, engine.global_steps = engine.global_steps, handle.step
        engine.global_samples = handle.step * engine.train_batch_size()
        if engine.lr_scheduler is not None:
            for _ in range(handle.step - before):
                engine.lr_scheduler.step()

    handle.joining.on_joined.append(on_joined)
