"""What a loop over Accelerate hands out of its model: the clusters' average.

`get_state_dict` and `save_model`, which all ranks call, hold the average. What a script takes of
the model itself in training is its cluster's own, and a warning says so where it is saved.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from dsx.comm.world import current_world
from dsx.run.accelerate.loop import Loop, Trained, on_all_ranks
from dsx.run.folders import save_beside
from dsx.run.replace import around

logger = logging.getLogger(__name__)


def replace_models(loop: Loop, accelerator: Any) -> None:
    """Replace `get_state_dict` and `save_model` of the class `Accelerator`."""

    def get_state_dict(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the average's weights. Collective over all clusters before the end."""
        one = None if loop.is_saving else _of_model(loop, self, model)
        if one is None or one.is_ended:
            return original(self, model, *args, **kwargs)
        with _average_of(one, "get_state_dict"):
            return copy.deepcopy(original(self, model, *args, **kwargs))

    def save_model(
        original: Any, self: Any, model: Any, save_directory: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Save the average. Collective over all clusters before the end."""
        one, world = _of_model(loop, self, model), current_world()
        if one is None or world is None:
            return original(self, model, save_directory, *args, **kwargs)

        def save(folder: Path) -> None:
            original(self, model, str(folder), *args, **kwargs)
            if not one.is_ended:
                self.wait_for_everyone()  # each rank has looked into it, before it is moved

        with nullcontext() if one.is_ended else _average_of(one, "save_model"):
            save_beside(Path(save_directory).absolute(), world, save, self.is_main_process)

    around(accelerator, "get_state_dict", get_state_dict)
    around(accelerator, "save_model", save_model)


def warn_of_own_weights(
    trained: Callable[[], Iterable[Trained]], modeling_utils: ModuleType
) -> None:
    """Let `save_pretrained` say so where it saves a cluster's own weights."""

    def save_pretrained(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("state_dict", args[2] if len(args) > 2 else None)
        for one in trained():
            is_own = not one.is_ended and any(self is module for module in one.model.modules())
            if is_own and given is None and one.accelerator.is_main_process:
                logger.warning(
                    "save_pretrained() saves the weights of cluster %d alone, at step %d: give it "
                    "state_dict=accelerator.get_state_dict(model), on all ranks, for the clusters' "
                    "average, or call it behind accelerator.end_training()",
                    one.handle.cluster_id, one.handle.step,
                )  # fmt: skip
        return original(self, *args, **kwargs)

    around(modeling_utils.PreTrainedModel, "save_pretrained", save_pretrained)  # type: ignore[attr-defined]


@contextmanager
def _average_of(one: Trained, what: str) -> Generator[None, None, None]:
    with ExitStack() as stack:
        with on_all_ranks(what):
            stack.enter_context(one.handle.averaged())
        yield


def _of_model(loop: Loop, accelerator: Any, model: Any) -> Trained | None:
    """Return what an Accelerator trains of a model, wrapped or not."""
    for one in loop.of(accelerator):
        if one.model is model or any(model is module for module in one.model.modules()):
            return one
    return None
