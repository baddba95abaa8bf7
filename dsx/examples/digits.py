"""Handwritten digits that scikit-learn ships: 1797 images of 8 x 8 pixels, nothing to download.

An image with its label is a row of 65 whole numbers: pixels of 0 to 16, line by line, then the
digit. So `dsx.data.ClusterBatches` divides and orders them like windows of text. The last fifth,
in the order of the file, is held out.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

SIDE = 8
NUM_CLASSES = 10
_MEAN, _DEVIATION = 4.9, 6.0  # of a pixel, over all images


class Digits:
    """Images with their labels, as rows int64 `[65]`."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.rows)

    def __getitem__(self, index: int, /) -> Tensor:
        """Return image `index` with its label."""
        return self.rows[index]


def read_digits() -> tuple[Digits, Digits]:
    """Return the images to train on and the held-out ones; ModuleNotFoundError says what to do."""
    try:
        datasets: Any = import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"needs scikit-learn, which ships the images, and there is no {error.name} here: "
            'pip install "dsx-train[vision]"'
        ) from None
    pixels, labels = datasets.load_digits(return_X_y=True)
    rows = torch.cat([torch.from_numpy(pixels), torch.from_numpy(labels)[:, None]], dim=1).long()
    cut = len(rows) * 4 // 5
    return Digits(rows[:cut]), Digits(rows[cut:])


def images_and_labels(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Cut rows int64 `[batch, 65]` into images fp32 `[batch, 1, 8, 8]` and labels `[batch]`.

    Pixels are shifted and scaled to mean 0 and deviation 1.
    """
    images = (rows[:, :-1].float() - _MEAN) / _DEVIATION
    return images.view(-1, 1, SIDE, SIDE), rows[:, -1]
