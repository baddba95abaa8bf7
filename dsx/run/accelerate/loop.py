"""`Accelerator`: what a loop prepares is attached, and what it ends is finished.

With DeepSpeed the engine is attached as `deepspeed.initialize` makes it; without, the model and its
optimizers as soon as `prepare` has made them ready: under DDP, FSDP2, or alone. A stop that one
cluster's trigger asks for is taken by all of them at one step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import dsx
from dsx.comm.world import World, current_world
from dsx.config.files import ConfigError
from dsx.run.accelerate.loaders import require_cut, require_not_made_before, require_shared
from dsx.run.accelerate.refusals import refuse_settings
from dsx.run.accelerate.saves import Saves
from dsx.run.first_step import FirstStep
from dsx.run.replace import around
from dsx.run.session import RouteNotTaken, Session
from dsx.training.finish import keep_exported
from dsx.training.handle import Handle
from dsx.training.seen_training import see_loss

_ALONE_SECONDS = 30.0
logger = logging.getLogger(__name__)


@contextmanager
def on_all_ranks(what: str) -> Generator[None, None, None]:
    """Say so where the other ranks let one wait, which may have called `what` alone."""

    def tell() -> None:
        logger.warning(
            "accelerator.%s() has waited %d s for other ranks: it is called on all ranks of all "
            "clusters, also under DDP; inside `if accelerator.is_main_process:` it waits in vain, "
            "up to the deadline of the collectives", what, _ALONE_SECONDS,
        )  # fmt: skip

    timer = threading.Timer(_ALONE_SECONDS, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass
class Trained:
    """A model that an Accelerator has made ready, and its handle; `is_engine` with DeepSpeed."""

    accelerator: Any
    model: Any
    optimizers: list[Any]  # as Accelerate has wrapped them
    handle: Handle
    is_engine: bool
    first_step: FirstStep | None = None  # without an engine, which sees to it itself
    is_ended: bool = False


@dataclass
class Loop:
    """What the loops of one process train."""

    session: Session
    trained: list[Trained] = field(default_factory=list)
    prepared: list[tuple[Any, Any]] = field(default_factory=list)  # Accelerators and models
    saves: list[tuple[Any, Saves]] = field(default_factory=list)  # by Accelerator
    is_saving: bool = False  # inside save_state(), which saves what is the cluster's own

    def of(self, accelerator: Any) -> Iterator[Trained]:
        """Yield what an Accelerator trains, in the order in which it was made ready."""
        return (one for one in self.trained if one.accelerator is accelerator)

    def saves_of(self, accelerator: Any) -> Saves:
        """Return what an Accelerator that trains has saved; made at first."""
        found = next((saves for owner, saves in self.saves if owner is accelerator), None)
        if found is None:
            world = current_world()
            assert world is not None
            checkpoints = self.session.settings.checkpoints
            found = Saves(next(self.of(accelerator)).handle, world, checkpoints)
            self.saves.append((accelerator, found))
        return found

    def open(self, accelerator: Any) -> list[Trained]:
        """Return what of it has not ended."""
        return [one for one in self.of(accelerator) if not one.is_ended]

    def end(self, accelerator: Any) -> None:
        """Finish what an Accelerator trains, and keep the average in its models. Collective."""
        for one in self.open(accelerator):
            one.handle.finish()
            keep_exported(one.handle.loop)
            one.is_ended = True
            self.session.ended.append(one.handle)


class EndOfLoop:
    """A run that is told to end: it goes on from the script's last `save_state()`.

    Where the script is in its data, it alone knows.
    """

    needs_callback, ends_elsewhere, saves_when_asked = True, False, False
    without_callback = "it goes on from what accelerator.save_state() has saved last"

    def save(self, base: Any, tag: str) -> Any:
        """Leave it to the script, which has given a callback; return where that may write."""
        raise RuntimeError(f"{tag}: {self.without_callback}")


def replace_accelerator(session: Session, accelerator: ModuleType) -> Loop:
    """Replace the methods of `Accelerator` by which a loop trains."""
    module: Any = accelerator
    cls, loop = module.Accelerator, Loop(session)
    replaced = _Replaced(loop)
    around(cls, "__init__", replaced.make)
    for name in ("prepare", "backward", "check_trigger", "end_training", "free_memory"):
        around(cls, name, getattr(replaced, name))
    around(cls, "join_uneven_inputs", replaced.join_uneven_inputs)
    around(module.AcceleratedOptimizer, "step", replaced.step)
    return loop


class _Replaced:
    """The methods that stand in for those of Accelerator and its optimizer."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._session = loop.session

    def make(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> None:
        """Take note that there is one: loaders are cut from now on."""
        self._session.has_accelerator = True
        original(accelerator, *args, **kwargs)

    def prepare(self, original: Any, accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        """Make ready, and attach what is trained. Collective over all clusters where it does."""
        session = self._session
        world = session.join()
        if world is None or self._is_of_trainer(accelerator, args):
            return original(accelerator, *args, **kwargs)
        refuse_settings(accelerator, session.settings)
        require_not_made_before(session, args)
        require_shared(session, world, args)
        session.divides_data = True
        known = len(session.handles)
        result = original(accelerator, *args, **kwargs)
        made = result if isinstance(result, (tuple, list)) else (result,)
        for model in (one for one in made if hasattr(one, "named_parameters")):
            self._loop.prepared.append((accelerator, model))
        if len(session.handles) > known:
            self._take_engine(accelerator, made)
        elif str(accelerator.distributed_type) != "DistributedType.DEEPSPEED":
            self._attach(accelerator, world)
        return result

    def _is_of_trainer(self, accelerator: Any, args: tuple[Any, ...]) -> bool:
        """Whether it is a Trainer's, which is served elsewhere; a loop beside one is refused."""
        session = self._session
        if any(trainer.accelerator is accelerator for trainer in session.trainers):
            return True
        if not session.has_arguments:
            return False
        if any(hasattr(one, "param_groups") or _is_stand_in(one) for one in args):
            raise RouteNotTaken(
                "Accelerator.prepare() with an optimizer, in a loop beside TrainingArguments, is "
                "not served by dsx.run, which serves Trainer.train(), and loops over Accelerate of "
                "scripts without TrainingArguments"
            )
        return True

    def _take_engine(self, accelerator: Any, made: Any) -> None:
        handle = self._session.handles[-1]
        engine = next(one for one in made if getattr(one, "dsx", None) is handle)
        optimizers = [one for one in made if hasattr(one, "param_groups")]
        self._take(Trained(accelerator, engine, optimizers, handle, is_engine=True))

    def _attach(self, accelerator: Any, world: World) -> None:
        """Attach models whose optimizers are there."""
        attached = [one.model for one in self._loop.of(accelerator)]
        for owner, model in self._loop.prepared:
            if owner is not accelerator or any(model is one for one in attached):
                continue
            own = {id(parameter) for parameter in model.parameters()}
            optimizers = [o for o in accelerator._optimizers if _is_over(o, own)]
            if not optimizers:
                continue
            if accelerator.scaler is not None and len(optimizers) > 1:
                raise ConfigError(
                    "mixed_precision='fp16' with several optimizers of one model is not served by "
                    "dsx.run, as its GradScaler may skip a step of one of them: use 'bf16'"
                )
            inner = [optimizer.optimizer for optimizer in optimizers]
            config = self._session.config_with_block({})
            handle: Handle = dsx.attach(model, inner, config=config)
            self._session.handles.append(handle)
            first = FirstStep(
                handle.loop.adapter, inner, "accelerator.prepare()",
                "load the weights before accelerator.prepare(), or by accelerator.load_state()",
            )  # fmt: skip
            self._take(Trained(accelerator, model, optimizers, handle, False, first))

    def _take(self, trained: Trained) -> None:
        trained.handle.preemption.engine = EndOfLoop()
        self._loop.trained.append(trained)
        self._session.models.append(trained.model)
        self._session.keeping_average.append(trained.handle)

    def backward(self, original: Any, accelerator: Any, loss: Any, **kwargs: Any) -> None:
        """Refuse what all clusters would train on."""
        trained = self._loop.open(accelerator)
        for one in trained:
            one.handle.preemption.end_if_due()
            see_loss(one.handle.progress, loss)
        if trained:
            loaders = accelerator.gradient_state.dataloader_references
            require_cut(self._session, [loader for loader in loaders if loader is not None])
        original(accelerator, loss, **kwargs)

    def step(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """Tell of a step that a GradScaler has skipped."""
        original(optimizer, *args, **kwargs)
        if optimizer.scaler is None or not optimizer.gradient_state.sync_gradients:
            return
        for one in self._loop.trained:
            if optimizer.step_was_skipped and any(optimizer is o for o in one.optimizers):
                one.handle.skip_inner_step()

    def check_trigger(self, original: Any, accelerator: Any) -> bool:
        """Ask for a stop where a rank has set the trigger; return whether all clusters stop now."""
        is_set = original(accelerator)
        trained = self._loop.open(accelerator)
        if not trained:
            return is_set
        if is_set:
            trained[0].handle.request_stop("accelerator.set_trigger()")
        return trained[0].handle.should_stop()

    def end_training(self, original: Any, accelerator: Any) -> None:
        """Finish before the ranks part."""
        self._loop.end(accelerator)
        original(accelerator)

    def free_memory(self, original: Any, accelerator: Any, *objects: Any) -> Any:
        """Finish and let go of what is freed. Collective over all clusters."""
        loop, session = self._loop, self._session
        loop.end(accelerator)
        for one in list(loop.of(accelerator)):
            one.handle.close()
            session.handles = [handle for handle in session.handles if handle is not one.handle]
            loop.trained.remove(one)
            session.models.remove(one.model)
        loop.prepared = [entry for entry in loop.prepared if entry[0] is not accelerator]
        loop.saves = [entry for entry in loop.saves if entry[0] is not accelerator]
        return original(accelerator, *objects)

    def join_uneven_inputs(self, original: Any, accelerator: Any, *args: Any, **kw: Any) -> Any:
        """Refuse ranks of a cluster that take different numbers of steps."""
        if self._loop.open(accelerator) and accelerator.num_processes > 1:
            raise ConfigError(
                "accelerator.join_uneven_inputs() is not served by dsx.run: all ranks of a cluster "
                "take the same steps; leave even_batches=True, or give the loader drop_last=True"
            )
        return original(accelerator, *args, **kw)


def _is_over(optimizer: Any, parameters: set[int]) -> bool:
    """Whether an optimizer steps parameters of a model."""
    held = [id(p) for group in optimizer.param_groups for p in group["params"]]
    return any(one in parameters for one in held)


def _is_stand_in(one: Any) -> bool:
    """Whether it is accelerate's word for the optimizer that the DeepSpeed config names."""
    return type(one).__name__ == "DummyOptim"
