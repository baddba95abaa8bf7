"""One `Trainer.fit` across clusters: its handle, from the strategy's setup to the end of training.

With DeepSpeed the engine is attached already as the strategy makes it; for the other strategies
the wrapped module and its optimizers are attached here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dsx
from dsx.comm.world import World
from dsx.engines.torch import as_list
from dsx.run.first_step import FirstStep
from dsx.run.session import RouteNotTaken, Session
from dsx.training.finish import keep_exported
from dsx.training.handle import Handle

_PLACE = "_dsx_fit"


class Fit:
    """What the replaced methods of one Trainer share."""

    def __init__(self, session: Session, world: World) -> None:
        self.session = session
        self.world = world
        self.handle: Handle | None = None
        self.has_begun = False  # whether fit() was called
        self.is_agreed = False  # whether all clusters stop
        self.is_ended = False
        self.is_saved = True  # whether this cluster's last checkpoint could be written
        self.checkpoints = session.settings.checkpoints
        self.resume: Path | None = None  # the directory of the tag that training goes on from
        self.resume_tag = ""  # its name, the same in all clusters
        self.weights_only: bool | None = None  # as fit() was told, for the checkpoint it loads
        self.cut: dict[str, int] | None = None  # the sampler's, while a training loader is cut
        self.metrics: dict[str, Any] = {}  # cluster 0's, of the last validation

    @property
    def is_training(self) -> bool:
        """Whether there is an engine, and a step may follow."""
        return self.handle is not None and not self.is_ended

    @property
    def puts_off(self) -> bool:
        """Whether what a ModelCheckpoint deletes waits for what comes in its place."""
        return self.checkpoints.is_later

    def attach(self, strategy: Any) -> None:
        """Attach what a strategy has made. Collective over all ranks of all clusters."""
        self.session.divides_data = True
        self.handle = getattr(strategy.model, "dsx", None)
        if self.handle is None:
            if has_engine(strategy):
                raise RouteNotTaken(
                    'Lightning\'s DeepSpeedStrategy has made an engine without the "dsx" block: '
                    "give --dsx-config FILE, or put the block into the strategy's config"
                )
            config = self.session.config_with_block({})
            self.handle = dsx.attach(strategy.model, strategy.optimizers, config=config)
            if self.resume is None:
                self.watch_weights(strategy)
        if self.puts_off:
            self.require_handle().keeping.serve_library()

    def watch_weights(self, strategy: Any) -> None:
        """Let the first step be an error if the weights are others by then; not with an engine.

        Where a checkpoint is loaded, from then on: torch steps an optimizer to load its state.
        """
        FirstStep(
            self.require_handle().loop.adapter, as_list(strategy.optimizers), "its setup in fit()",
            "load the weights before fit(), or in configure_model() or setup(), and not in "
            "on_fit_start() or on_train_start(); fit(ckpt_path=...) resumes a run",
        )  # fmt: skip

    def require_handle(self) -> Handle:
        """Return the handle; RuntimeError before there is one."""
        if self.handle is None:
            raise RuntimeError("fit() has not come to its strategy's setup")
        return self.handle

    def end(self, strategy: Any) -> None:
        """Finish training and keep the clusters' average, once. Collective over all clusters."""
        if not self.is_training:
            return
        handle = self.require_handle()
        handle.finish()
        keep_exported(handle.loop)
        self.is_ended = True
        handle.close()
        engine = strategy.model
        if handle in self.session.handles:
            self.session.handles.remove(handle)
        for name in ("save_checkpoint", "load_checkpoint"):
            vars(engine).pop(name, None)  # from now on DeepSpeed's own


def set_fit(trainer: Any, fit: Fit) -> None:
    """Keep what belongs to a Trainer."""
    setattr(trainer, _PLACE, fit)


def fit_of(trainer: Any) -> Fit | None:
    """Return what belongs to a Trainer; None for one that was made outside of any world."""
    found: Fit | None = getattr(trainer, _PLACE, None)
    return found


def is_fitting(trainer: Any) -> bool:
    """Whether a Trainer is in fit(), not in validate(), test() or predict()."""
    return str(getattr(trainer.state.fn, "value", trainer.state.fn)) == "fit"


def has_engine(strategy: Any) -> bool:
    """Whether a strategy trains with a DeepSpeed engine."""
    return hasattr(strategy, "deepspeed_engine")
