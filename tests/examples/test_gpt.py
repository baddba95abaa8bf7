"""The example model: causal, trainable, the size that is promised, the same from a seed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsx.examples.gpt import GPT, GPTConfig

TINY = GPTConfig(num_layers=2, hidden_size=32, num_heads=2, sequence_length=16, vocab_size=257)


def random_tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TINY.vocab_size, (batch, length), generator=generator)


def test_default_size_is_that_of_the_quickstart() -> None:
    assert 2_000_000 <= GPT(GPTConfig()).num_parameters() <= 5_000_000


def test_untrained_loss_is_near_that_of_guessing() -> None:
    windows = random_tokens(8, 17)
    loss = GPT(TINY)(windows[:, :-1], windows[:, 1:])
    assert loss.item() == pytest.approx(math.log(TINY.vocab_size), abs=0.1)


def test_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    windows = random_tokens(3, 17)
    model = GPT(TINY)
    logits = model(windows[:, :-1])
    assert logits.shape == (3, 16, TINY.vocab_size)
    chosen = logits.log_softmax(-1).gather(-1, windows[:, 1:, None])
    loss = model(windows[:, :-1], windows[:, 1:])
    torch.testing.assert_close(loss, -chosen.mean())


def test_overfits_one_batch() -> None:
    windows = random_tokens(2, 17)
    model = GPT(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[float] = []
    for _ in range(60):
        loss = model(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_future_tokens_do_not_change_past_logits() -> None:
    tokens = random_tokens(2, 16)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % TINY.vocab_size
    model = GPT(TINY)
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_order_of_past_tokens_matters() -> None:
    tokens = random_tokens(1, 16)
    swapped = tokens.clone()
    swapped[:, [2, 5]] = tokens[:, [5, 2]]
    model = GPT(TINY)
    assert not torch.allclose(model(tokens)[:, -1], model(swapped)[:, -1], atol=1e-6)


def test_bfloat16_is_close_to_float32_and_its_loss_is_float32() -> None:
    windows = random_tokens(4, 17)
    expected = GPT(TINY)(windows[:, :-1], windows[:, 1:])
    model = GPT(TINY).to(torch.bfloat16)
    loss = model(windows[:, :-1], windows[:, 1:])
    loss.backward()
    assert model(windows[:, :-1]).dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    torch.testing.assert_close(loss, expected, atol=0.02, rtol=0)


def test_seed_decides_the_weights() -> None:
    first, same, other = GPT(TINY, seed=3), GPT(TINY, seed=3), GPT(TINY, seed=4)
    torch.testing.assert_close(first.state_dict(), same.state_dict(), atol=0, rtol=0)
    assert not torch.equal(first.head.weight, other.head.weight)


def test_parameter_names() -> None:
    names = list(dict(GPT(TINY).named_parameters()))
    assert names[0] == "embedding.weight"
    assert names[-2:] == ["norm.weight", "head.weight"]
    assert "layers.0.attention.query.weight" in names
    assert "layers.1.feed_forward.down.weight" in names


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 100, "num_heads": 8}, r"hidden_size=100 .*2 \* num_heads=16.*try 112"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)
