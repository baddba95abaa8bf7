"""What a rank's loop asks of an engine, with dsx or without, and how an engine is found."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, cast

from torch import Tensor

from dsx.bench.engines.combinations import Combination, EngineName
from dsx.training.handle import Handle


class Trainer(Protocol):
    """One rank of a cluster that trains."""

    @property
    def handle(self) -> Handle | None:
        """The handle that dsx gives a script; None without dsx."""
        ...

    @property
    def data_rank(self) -> int:
        """This rank among those that read samples of their own."""
        ...

    @property
    def num_data_ranks(self) -> int:
        """How many there are."""
        ...

    def step(self, batches: Sequence[Tensor]) -> float | None:
        """Take one inner step on micro-batches, int64 [MICRO, length + 1] each.

        Return the mean loss of this rank's, nats, None on a stage that has none.
        """
        ...

    def evaluate(self, batches: Sequence[Tensor]) -> float | None:
        """Return the mean loss of micro-batches, as `step`; all ranks give the same ones."""
        ...

    def parameters(self) -> Iterable[Tensor]:
        """Yield what this rank holds of the model, whole or its part. Collective in the cluster."""
        ...


class Module(Protocol):
    """The module of an engine."""

    def warm(self) -> None:
        """Import what ranks need; nothing may be started that a fork would not survive."""
        ...

    def build(self, given: Combination, vocab_size: int, config: dict[str, Any] | None) -> Trainer:
        """Return a model, with dsx attached if there is a configuration for it.

        The cluster's world is there. Collective over all clusters.
        """
        ...


def module_of(name: EngineName) -> Module:
    """Return the module of an engine; of what it needs nothing is imported by that."""
    return cast("Module", importlib.import_module(f"dsx.bench.engines.{name}"))
