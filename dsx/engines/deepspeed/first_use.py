"""Weights that differ between clusters are sent when a DeepSpeed engine is used first, not before.

`dsx.initialize` comes before `engine.load_checkpoint`, which overwrites all masters: what clusters
with different seeds hold in between need not travel. So where they differ nothing is sent until a
forward, `train_batch` or `eval_batch` is asked for, `finish()`, `averaged()` or a checkpoint; and
nothing at all if one is loaded. Nobody gets there unnoticed: a module called on its own settles it,
too (in a pipeline, where stages do not compute at one time, it is refused), reading the
weights for a file of one's own is a warning, and a step taken in any other way is an error.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from dsx.training.handle import Handle

_USES = ("train_batch", "eval_batch", "inference_batch", "forward")
_READS = ("save_16bit_model", "save_fp16_model")
logger = logging.getLogger(__name__)


def settle_before_use(engine: Any, handle: Handle) -> None:
    """Have the clusters' weights settled before the engine computes anything, if they differ."""
    if handle.loop.beginning.is_open:
        _FirstUse(engine, handle)


class _FirstUse:
    """Stands before an engine until it is used, or a checkpoint has been loaded."""

    def __init__(self, engine: Any, handle: Handle) -> None:
        self._engine = engine
        self._handle = handle
        self._is_warned = False
        self._replaced: dict[str, tuple[Any, Any]] = {}
        is_pipeline = engine.pipeline_parallelism
        for name in _USES[: -1 if is_pipeline else None]:  # its own forward is within a batch
            self._stand_before(name, self._settle)
        for name in _READS:
            self._stand_before(name, self._warn)
        on_forward = self._refuse if is_pipeline else self._settle
        before_forward: Any = torch.compiler.disable(_before(on_forward))
        self._hooks: list[Any] = [
            module.register_forward_pre_hook(before_forward, prepend=True)
            for module in engine.module.modules()
        ]
        self._hooks.append(engine.module.register_state_dict_pre_hook(_before(self._warn)))

    def _stand_before(self, name: str, act: Callable[[], None]) -> None:
        original = getattr(engine := self._engine, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def stand_in(*args: Any, **kwargs: Any) -> Any:
            act()
            return original(*args, **kwargs)

        self._replaced[name] = (vars(engine).get(name), stand_in)
        setattr(engine, name, stand_in)

    def _settle(self) -> None:
        self._step_aside()
        self._handle.settle()

    def _refuse(self) -> None:
        if self._is_over():
            return
        raise RuntimeError(
            "a stage of the pipeline was called on its own while the clusters' weights differ: "
            "call engine.dsx.settle() on all ranks of all clusters first, or train_batch or "
            "eval_batch, which do"
        )

    def _warn(self) -> None:
        if self._is_over() or self._is_warned:
            return
        self._is_warned = True
        logger.warning(
            "this cluster's weights are being read while those of the clusters differ: for cluster "
            "0's call engine.dsx.settle() on all ranks of all clusters first"
        )

    def _is_over(self) -> bool:
        if not self._handle.loop.beginning.is_open:
            self._step_aside()
        return not self._handle.loop.beginning.is_open

    def _step_aside(self) -> None:
        """Give the engine its methods back, but for those that somebody else has replaced since."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for name, (before, stand_in) in self._replaced.items():
            if vars(self._engine).get(name) is not stand_in:
                continue
            if before is None:
                delattr(self._engine, name)
            else:
                setattr(self._engine, name, before)
        self._replaced.clear()


def _before(act: Callable[[], None]) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        act()

    return hook
