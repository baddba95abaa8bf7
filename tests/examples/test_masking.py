"""Masked windows: BERT's shares, always the same, and what an encoder learns from them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dsx.examples.gpt import GPT, GPTConfig
from dsx.examples.masking import NOT_PREDICTED, mask_tokens

VOCAB = 1000
ENCODER = GPTConfig(2, 32, 2, sequence_length=16, vocab_size=VOCAB + 1, is_causal=False)


def windows(count: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCAB, (count, length), generator=generator)


def test_shares_are_those_of_bert() -> None:
    given = windows(400, 128)
    inputs, targets = mask_tokens(given, VOCAB)
    predicted = targets != NOT_PREDICTED
    assert torch.equal(targets[predicted], given[predicted])
    assert torch.equal(inputs[~predicted], given[~predicted])
    assert predicted.float().mean().item() == pytest.approx(0.15, abs=0.005)
    of_predicted, own = inputs[predicted], given[predicted]
    assert (of_predicted == VOCAB).float().mean().item() == pytest.approx(0.8, abs=0.02)
    kept = (of_predicted == own).float().mean().item()  # a random token is the same once in 1000
    assert kept == pytest.approx(0.1, abs=0.02)
    assert 0.08 < 1 - kept - (of_predicted == VOCAB).float().mean().item() < 0.12
    assert inputs.max() == VOCAB and inputs.min() >= 0


def test_a_window_is_masked_in_one_way_whatever_is_beside_it() -> None:
    given = windows(8, 32)
    together = mask_tokens(given, VOCAB)
    alone = mask_tokens(given[3:4], VOCAB)
    assert all(torch.equal(a[3:4], b) for a, b in zip(together, alone, strict=True))
    swapped = given[3:4].flip(1)  # the same tokens in another order
    assert not torch.equal(
        mask_tokens(swapped, VOCAB)[1] == NOT_PREDICTED, alone[1] == NOT_PREDICTED
    )


def test_every_window_has_something_to_predict() -> None:
    _, targets = mask_tokens(windows(200, 3), VOCAB)
    assert (targets != NOT_PREDICTED).any(dim=1).all()


def test_an_encoder_sees_both_sides_and_a_decoder_the_past() -> None:
    given = windows(1, 16)
    changed = given.clone()
    changed[0, -1] += 1
    encoder, decoder = GPT(ENCODER), GPT(GPTConfig(2, 32, 2, 16, VOCAB + 1))
    assert not torch.equal(encoder(given)[0, 0], encoder(changed)[0, 0])
    assert torch.equal(decoder(given)[0, :-1], decoder(changed)[0, :-1])


def test_loss_is_of_what_is_predicted_alone() -> None:
    inputs, targets = mask_tokens(windows(4, 16), VOCAB)
    model = GPT(ENCODER)
    logs = model(inputs).log_softmax(-1)
    predicted = targets != NOT_PREDICTED
    chosen = logs[predicted].gather(-1, targets[predicted][:, None])
    torch.testing.assert_close(model(inputs, targets), -chosen.mean())
    assert model(inputs, targets).item() == pytest.approx(math.log(VOCAB), abs=0.2)
