"""What a study trains: a model, its data, and what is predicted of them.

    causal  the quickstart's GPT predicts the next token
    masked  the same as an encoder predicts hidden tokens (CO2, arXiv:2401.16265, has such a task)
    images  a ResNet with group norm names digits (DreamDDP, arXiv:2502.11058, has such tasks);
            a study's layers are its blocks, a multiple of 3, and its width the first stage's

All get the same inner AdamW: what is compared are outer methods.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import lru_cache
from pathlib import Path
from typing import Protocol

from torch import Tensor, nn

from dsx.bench.convergence.task import Study
from dsx.data import TokenWindows, read_summary
from dsx.data.shards import WindowDataset
from dsx.examples.digits import NUM_CLASSES, images_and_labels, read_digits
from dsx.examples.gpt import GPT, GPTConfig
from dsx.examples.masking import mask_tokens
from dsx.examples.resnet import ResNet, ResNetConfig


class Problem(Protocol):
    """One of the above."""

    @abstractmethod
    def make_model(self, study: Study, seed: int) -> nn.Module:
        """Return a model: of inputs it makes logits, of inputs and targets the mean loss."""
        ...

    @abstractmethod
    def read(self, study: Study) -> tuple[WindowDataset, WindowDataset]:
        """Return the rows to train on and the held-out ones."""
        ...

    @abstractmethod
    def inputs_and_targets(self, study: Study, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what a model takes of rows `[batch, ...]`; targets below 0 do not count."""
        ...


class Causal(Problem):
    """The next token."""

    is_causal = True

    def make_model(self, study: Study, seed: int) -> nn.Module:
        """Return the quickstart's kind of model."""
        tokens = _vocab_size(study.data) + (not self.is_causal)  # and the mask
        shape = GPTConfig(
            study.num_layers, study.hidden_size, study.num_heads, study.sequence_length, tokens,
            is_causal=self.is_causal, qk_norm=study.qk_norm, z_loss=study.z_loss,
        )  # fmt: skip
        return GPT(shape, seed)

    def read(self, study: Study) -> tuple[WindowDataset, WindowDataset]:
        """Return windows of `sequence_length` + 1 tokens."""
        data, length = Path(study.data), study.sequence_length
        return TokenWindows(data / "train", length), TokenWindows(data / "validation", length)

    def inputs_and_targets(self, study: Study, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return all tokens but the last, and all but the first."""
        return rows[:, :-1], rows[:, 1:]


class Masked(Causal):
    """Hidden tokens, by an encoder."""

    is_causal = False

    def inputs_and_targets(self, study: Study, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return as many tokens as `Causal` does, some of them hidden, and what those were."""
        return mask_tokens(rows[:, :-1], _vocab_size(study.data))


class Images(Problem):
    """Digits."""

    def make_model(self, study: Study, seed: int) -> nn.Module:
        """Return a ResNet; ValueError unless the study's layers are a multiple of 3."""
        if study.num_layers % 3:
            raise ValueError(
                f"--layers {study.num_layers} must be a multiple of 3 with --problem images: the "
                f"blocks of three stages; try --layers {study.num_layers // 3 * 3 + 3}"
            )
        if study.qk_norm or study.z_loss:
            raise ValueError(
                "--qk-norm and --z-loss are of a language model, not of --problem images; leave "
                "them out"
            )
        shape = ResNetConfig(study.num_layers // 3, study.hidden_size, NUM_CLASSES, norm="group")
        return ResNet(shape, seed)

    def read(self, study: Study) -> tuple[WindowDataset, WindowDataset]:
        """Return rows of pixels with their label."""
        return read_digits()

    def inputs_and_targets(self, study: Study, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return images and labels."""
        return images_and_labels(rows)


@lru_cache
def _vocab_size(data: str) -> int:
    return read_summary(data).vocab_size


PROBLEMS: dict[str, Problem] = {"causal": Causal(), "masked": Masked(), "images": Images()}
