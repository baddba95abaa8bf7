"""DeepSpeed's save on a disk that is full: a rank that cannot write goes on to its collectives.

DeepSpeed (0.19) writes each file where its rank has it, between collectives of all ranks: one that
raised there would leave the others waiting. So its writers keep a failure for the end of the save.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from dsx.engines.agreed_save import AgreedSave
from dsx.engines.deepspeed.private import replaced_copy_of_script


class _Writer:
    """DeepSpeed's checkpoint engine, whose failures to write wait."""

    def __init__(self, engine: Any, saving: AgreedSave) -> None:
        self._engine = engine
        self._saving = saving

    def save(self, *args: Any, **kwargs: Any) -> Any:
        return _later(self._engine.save, self._saving)(*args, **kwargs)

    def makedirs(self, *args: Any, **kwargs: Any) -> Any:
        return _later(self._engine.makedirs, self._saving)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@contextmanager
def failing_together(engine: Any, saving: AgreedSave) -> Generator[None, None, None]:
    """Let DeepSpeed save inside; what it cannot write is an error at `saving.agree()`."""
    writer = engine.checkpoint_engine
    engine.checkpoint_engine = _Writer(writer, saving)
    try:
        with replaced_copy_of_script(engine, lambda copy: _later(copy, saving)):
            yield
    finally:
        engine.checkpoint_engine = writer


def _later(write: Callable[..., Any], saving: AgreedSave) -> Callable[..., Any]:
    def attempt(*args: Any, **kwargs: Any) -> Any:
        try:
            return write(*args, **kwargs)
        except (OSError, RuntimeError) as error:  # torch's writer of archives raises the latter
            saving.note(error)
            return None

    return attempt
