"""Who takes the inner steps of a run on a line: DeepSpeed's engine, or plain PyTorch (torchft).

Both build the job's model and train it with AdamW and clipping as the job's DeepSpeed JSON says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from dsx.bench.e2e.job import Job, build_model


class Inner(Protocol):
    """A model and what trains it."""

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        ...

    def take_step(self, windows: Tensor) -> float:
        """Take one inner step on int64 `[batch, length + 1]`; return its loss."""
        ...


class PlainInner:
    """Plain PyTorch, with nothing in between."""

    def __init__(self, job: Job) -> None:
        self.model = build_model(job.shape, job.seed)
        chosen = job.config["optimizer"]["params"]
        self.optimizer = AdamW(self.model.parameters(), lr=chosen["lr"])
        self._clipping = job.config["gradient_clipping"]

    def take_step(self, windows: Tensor) -> float:
        """Take one inner step; return its loss."""
        loss = self.model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        clip_grad_norm_(self.model.parameters(), self._clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


class DeepSpeedInner:
    """DeepSpeed's engine, made by `deepspeed.initialize` or, with outer training, by dsx's."""

    def __init__(
        self, job: Job, initialize: Callable[..., tuple[Any, ...]], config: dict[str, Any]
    ) -> None:
        model = build_model(job.shape, job.seed)
        self.engine: Any = initialize(
            model=model, model_parameters=model.parameters(), config=config
        )[0]
        self.model: nn.Module = self.engine.module

    def take_step(self, windows: Tensor) -> float:
        """Take one inner step; return its loss."""
        loss = self.engine(windows[:, :-1], windows[:, 1:])
        self.engine.backward(loss)
        self.engine.step()
        return loss.item()
