"""How a Lightning goes on from a checkpoint, with fakes for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from dsx.engines.torch import TorchAdapter
from dsx.method.fragments import WholeModel
from dsx.run.lightning import resume
from tests.run.test_library_deletions import fitting


@pytest.mark.parametrize("is_attached", [True, False])
def test_a_step_of_torchs_own_as_a_checkpoint_is_loaded_is_no_inner_step(is_attached: bool) -> None:
    """ModelParallelStrategy loads the optimizers' state where others load the model alone."""
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    adapter, steps, asked = TorchAdapter(model, optimizer, WholeModel()), list[bool](), list[Any]()
    adapter.on_inner_step(steps.append)
    trainer, fit, _ = fitting(loop=SimpleNamespace(adapter=adapter))
    trainer.state = SimpleNamespace(fn="fit")
    fit.weights_only = False
    if not is_attached:
        fit.handle = None

    def load(path: str, weights_only: bool | None = None) -> None:
        asked.append((path, weights_only))
        if is_attached:
            get_optimizer_state_dict(model, optimizer)

    connector = SimpleNamespace(trainer=trainer)
    resume._start(load, connector, "a.ckpt")
    assert asked == [("a.ckpt", False)] and bool(optimizer.state) == is_attached
    assert not steps
    optimizer.step()
    assert steps == [False]
