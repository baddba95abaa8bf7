"""The example model: causal, trainable, the size that is promised, the same from a seed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.examples.gpt import GPT, Attention, GPTConfig, rotary_angles, rotate

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


def test_options_are_off_and_leave_the_weights_as_they_are() -> None:
    plain, normed = GPT(TINY), GPT(replace(TINY, qk_norm=True, z_loss=1e-4))
    added = {f"layers.{i}.attention.{n}_norm.weight" for i in (0, 1) for n in ("query", "key")}
    assert set(normed.state_dict()) - set(plain.state_dict()) == added
    assert all(torch.equal(normed.state_dict()[n], w) for n, w in plain.state_dict().items())


def test_norms_of_queries_and_keys_bound_the_logits_of_attention() -> None:
    """However large the weights of queries and keys, the scores are those of unit vectors."""
    x = torch.randn(1, 8, TINY.hidden_size, generator=torch.Generator().manual_seed(0))
    angles = rotary_angles(TINY, 8, x.device)
    plain, normed = Attention(TINY), Attention(replace(TINY, qk_norm=True))
    normed.load_state_dict(plain.state_dict(), strict=False)
    found = [module(x, *angles) for module in (plain, normed)]
    with torch.no_grad():
        for module in (plain, normed):
            module.query.weight.mul_(64.0)
    again = [module(x, *angles) for module in (plain, normed)]
    torch.testing.assert_close(again[1], found[1], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(again[0], found[0], rtol=1e-1)
    # in plain torch
    heads = [
        module(x).view(1, 8, TINY.num_heads, -1).transpose(1, 2)
        for module in (plain.query, plain.key, plain.value)
    ]
    unit = [F.rms_norm(h, (TINY.head_size,), eps=TINY.norm_epsilon) for h in heads[:2]]
    query, key = (rotate(h, *angles) for h in unit)
    scores = (query @ key.transpose(-1, -2)) / TINY.head_size**0.5
    scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -torch.inf).softmax(-1)
    mixed = (scores @ heads[2]).transpose(1, 2).reshape(1, 8, -1)
    torch.testing.assert_close(again[1], plain.output(mixed))


def test_the_z_loss_is_of_training_alone() -> None:
    windows = random_tokens(3, 17)
    model = GPT(replace(TINY, z_loss=0.5))
    logits = model(windows[:, :-1])
    entropy = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    log_z = logits.exp().sum(-1).log()
    trained = model(windows[:, :-1], windows[:, 1:])
    torch.testing.assert_close(trained, entropy + 0.5 * (log_z**2).mean())
    model.eval()
    torch.testing.assert_close(model(windows[:, :-1], windows[:, 1:]), entropy)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 100, "num_heads": 8}, r"hidden_size=100 .*2 \* num_heads=16.*try 112"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0 must be at least 0, and finite; try 1e-4"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**fields)
