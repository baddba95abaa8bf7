"""The example network for images: its depth, its layers to dsx, the same from a seed, trainable."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from dsx.core.types import ParameterShape
from dsx.examples.digits import images_and_labels
from dsx.examples.resnet import ResNet, ResNetConfig
from dsx.method.fragments import ByLayer

TINY = ResNetConfig(width=8)


def random_rows(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 17, (count, 64), generator=generator)
    return torch.cat([pixels, torch.arange(count)[:, None] % 10], dim=1)


@pytest.mark.parametrize("blocks", [1, 3])
def test_depth_is_that_of_the_paper(blocks: int) -> None:
    model = ResNet(ResNetConfig(blocks, width=8))
    weighty = [m for n, m in model.named_modules() if isinstance(m, nn.Conv2d | nn.Linear)
               and not n.endswith("shortcut")]  # fmt: skip
    assert len(weighty) == 6 * blocks + 2


def test_the_image_is_halved_twice_while_channels_double() -> None:
    model, shapes = ResNet(TINY), list[tuple[int, ...]]()
    for block in model.blocks:
        block.register_forward_hook(lambda m, i, o: shapes.append(tuple(o.shape[1:])))
    model(torch.zeros(2, 1, 8, 8))
    assert shapes == [(8, 8, 8), (16, 4, 4), (32, 2, 2)]


def test_a_block_is_a_layer_to_dsx() -> None:
    named = ResNet(ResNetConfig(2, width=8)).named_parameters()
    shapes = [ParameterShape(name, tuple(p.shape), "float32") for name, p in named]
    layers = ByLayer().assign(shapes)
    assert len(layers) == 6
    assert layers[0][0] == "stem.weight" and layers[-1][-1] == "head.bias"


def test_a_seed_gives_the_same_weights() -> None:
    first, again, other = ResNet(TINY, 3), ResNet(TINY, 3), ResNet(TINY, 4)
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(first.stem.weight, other.stem.weight)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_overfits_one_batch(norm: str) -> None:
    images, labels = images_and_labels(random_rows(10))
    model = ResNet(ResNetConfig(width=8, norm=norm))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(30):
        optimizer.zero_grad()
        loss = model(images, labels)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    assert bool(list(model.buffers())) == (norm == "batch")


def test_rows_become_images_line_by_line() -> None:
    rows = random_rows(3)
    images, labels = images_and_labels(rows)
    assert images.shape == (3, 1, 8, 8) and torch.equal(labels, torch.tensor([0, 1, 2]))
    brightness = images * 6.0 + 4.9
    assert brightness[1, 0, 2, 5].item() == pytest.approx(float(rows[1, 2 * 8 + 5]), abs=1e-5)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 0}, "width=0 must be at least 1"),
        ({"width": 12, "norm": "group"}, "width=12 must be a multiple of 8.*try 16"),
        ({"norm": "layer"}, "norm='layer' must be one of batch, group"),
    ],
)
def test_what_cannot_be_built_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ResNetConfig(**given)  # type: ignore[arg-type]
