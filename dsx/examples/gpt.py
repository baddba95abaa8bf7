"""A small Llama-style GPT in plain torch: what the example scripts train.

Root-mean-square norms (arXiv:1910.07467), rotary positions (arXiv:2104.09864), SwiGLU
(arXiv:2002.05202), pre-norm residual blocks, no biases, embedding and head not tied. Two options
against large logits, as Eager Updates (arXiv:2502.12996, Sec. 3) trains: norms of queries and keys
(arXiv:2010.04245, here root-mean-square ones per head) and a z-loss (arXiv:2204.02311).

Invariants: a token's logits depend only on itself and the tokens before it, unless `is_causal` is
off, which makes it an encoder for masked language modelling (masking.py); the same config and seed
give the same weights on every rank; norms, rotary angles and the loss are computed in fp32,
whatever the dtype of the weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model."""

    num_layers: int = 4
    hidden_size: int = 256
    num_heads: int = 4
    sequence_length: int = 256
    vocab_size: int = 257
    rotary_base: float = 10000.0
    norm_epsilon: float = 1e-5
    is_causal: bool = True
    qk_norm: bool = False  # queries and keys are normalised per head, before they are rotated
    z_loss: float = 0.0  # the weight of mean(log(Z)^2) in training, Z the softmax's denominator

    def __post_init__(self) -> None:
        for name in ("num_layers", "hidden_size", "num_heads", "sequence_length", "vocab_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.hidden_size % (2 * self.num_heads):
            step = 2 * self.num_heads
            raise ValueError(
                f"hidden_size={self.hidden_size} must be a multiple of 2 * num_heads={step} "
                f"(rotary positions turn pairs); try {-(-self.hidden_size // step) * step}"
            )
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss={self.z_loss} must be at least 0, and finite; try 1e-4")

    @property
    def head_size(self) -> int:
        """Return the width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def feed_forward_size(self) -> int:
        """Return 8/3 of the hidden size, rounded up to a multiple of 32."""
        return -(-8 * self.hidden_size // (3 * 32)) * 32


class RMSNorm(nn.Module):
    """Scale by the reciprocal root mean square, in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis; return the dtype of `x`."""
        return F.rms_norm(x.float(), x.shape[-1:], self.weight.float(), self.epsilon).to(x.dtype)


def rotary_angles(config: GPTConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine, fp32 `[length, head_size / 2]`, of each position's angles."""
    exponents = torch.arange(0, config.head_size, 2, device=device, dtype=torch.float32)
    frequencies = config.rotary_base ** (-exponents / config.head_size)
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Turn the two halves of each head of `x` `[batch, heads, length, head_size]` by the angles."""
    first, second = x.float().chunk(2, dim=-1)
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return torch.cat(turned, dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Multi-head self-attention with rotary positions, to the past or to all positions."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.is_causal = config.is_causal
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, size, bias=False)
        self.value = nn.Linear(size, size, bias=False)
        self.output = nn.Linear(size, size, bias=False)
        self.query_norm = self.key_norm = None
        if config.qk_norm:
            self.query_norm = RMSNorm(config.head_size, config.norm_epsilon)
            self.key_norm = RMSNorm(config.head_size, config.norm_epsilon)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Attend from each position of `x` `[batch, length, hidden]` to those it may see."""
        heads = (self.num_heads, -1)
        query = self.query(x).unflatten(-1, heads).transpose(1, 2)
        key = self.key(x).unflatten(-1, heads).transpose(1, 2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        value = self.value(x).unflatten(-1, heads).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        return self.output(mixed.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """The SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.feed_forward_size, bias=False)
        self.down = nn.Linear(config.feed_forward_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., hidden]` to `[..., hidden]`."""
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """One pre-norm residual block: attention, then feed-forward."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Map `[batch, length, hidden]` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cosine, sine)
        return x + self.feed_forward(self.feed_forward_norm(x))


class GPT(nn.Module):
    """A language model over `config.vocab_size` tokens: decoder-only, or an encoder."""

    def __init__(self, config: GPTConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_epsilon)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.initialize_weights_(seed)

    @torch.no_grad()
    def initialize_weights_(self, seed: int) -> None:
        """Draw every matrix from N(0, 0.02^2), residual outputs smaller, in place."""
        generator = torch.Generator().manual_seed(seed)
        residual_scale = (2 * self.config.num_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                is_residual = name.endswith(("output.weight", "down.weight"))
                deviation = 0.02 * (residual_scale if is_residual else 1.0)
                parameter.normal_(0.0, deviation, generator=generator)

    def num_parameters(self) -> int:
        """Return the number of weights."""
        return sum(parameter.numel() for parameter in self.parameters())

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits `[batch, length, vocab]`, or given targets the mean cross entropy in nats.

        `tokens` and `targets` are int64 `[batch, length]`; a target is the token one further on, or
        whatever else is to be predicted there, -100 for nothing.
        In training the z-loss is in it, where there is one.
        """
        cosine, sine = rotary_angles(self.config, tokens.shape[1], tokens.device)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cosine, sine)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return language_loss(logits, targets, self.config.z_loss if self.training else 0.0)


def language_loss(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Return the mean cross entropy in nats, and `z_loss` times the mean of log(Z)^2."""
    logits = logits.flatten(0, 1).float()
    loss = F.cross_entropy(logits, targets.flatten())
    return loss + z_loss * logits.logsumexp(-1).square().mean() if z_loss else loss
