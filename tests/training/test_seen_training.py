"""What the progress lines say of a script that tells nothing: token ids and losses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from dsx.telemetry.progress import Progress
from dsx.training.seen_training import count_ids, see_losses, see_tokens

IDS = torch.arange(12).view(3, 4)


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({"input_ids": IDS, "labels": IDS}, 12),
        ((IDS, IDS), 12),
        (([IDS, IDS], 3), 12),
        (({"input_ids": IDS.int()}, 0), 12),
        ((IDS.float(),), 0),
        ((IDS[0],), 0),  # labels, say
        ({"pixel_values": IDS}, 0),
        ((), 0),
    ],
)
def test_ids_are_counted_and_nothing_else(given: Any, count: int) -> None:
    assert count_ids(given) == count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 2)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.words(input_ids).sum()


def test_tokens_of_training_are_seen_and_those_of_evaluation_are_not() -> None:
    progress, model = Progress(0, 5.0, speaks=True), Model()
    see_tokens(progress, model, num_readers=2)
    model(IDS)
    model(input_ids=IDS)
    with torch.no_grad():
        model(IDS)
    model.eval()(IDS)
    assert ", 48 tokens/s" in progress.line(1, 1.0)


def test_the_loss_that_goes_backward_is_seen_and_not_held_by_its_graph() -> None:
    progress = Progress(0, 5.0, speaks=True)
    given: list[Any] = []
    engine = SimpleNamespace(backward=lambda loss, scale=True: given.append((loss, scale)))
    see_losses(progress, engine)
    loss = Model()(IDS) * 0 + 2.5
    engine.backward(loss)
    engine.backward(loss=loss, scale=False)
    engine.backward(torch.ones(2))
    assert given[:2] == [(loss, True), (loss, False)]
    assert ", loss 2.5, " in progress.line(1, 1.0)
    assert not vars(progress)["_seen_loss"].requires_grad


def test_a_rank_that_says_nothing_is_left_as_it_is() -> None:
    progress, model = Progress(0, 0.0, speaks=True), Model()
    engine = SimpleNamespace(backward=len)
    see_tokens(progress, model, 1)
    see_losses(progress, engine)
    assert not model._forward_pre_hooks and engine.backward is len
