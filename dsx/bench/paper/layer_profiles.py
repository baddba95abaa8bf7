"""The layers of DreamDDP's four models: how much each computes and sends (arXiv:2502.11058, 4.1).

A layer is a module with parameters, in the model's order. The paper gives names and, for Llama-2,
the number of parameters alone; its shape is that of the profiles which the authors publish with
their code: 8 layers of width 512, 11008 and 32000 tokens make the 175M. There GPT-2's head is sent
beside the embedding that it is tied to; so it is here.
"""

from __future__ import annotations

from typing import NamedTuple


class Layer(NamedTuple):
    """Parameters, and multiply-adds of a forward of one image or token; a backward has twice."""

    parameters: int
    macs: int


def resnet18() -> list[Layer]:
    """Return those of ResNet-18 for CIFAR-10: 3 x 3 stem, no pooling before the end."""
    layers = [*_convolution(3, 64, 3, 32)]
    channels = 64
    for stage, blocks in enumerate((2, 2, 2, 2)):
        width, side = 64 << stage, 32 >> stage
        for _ in range(blocks):
            layers += _convolution(channels, width, 3, side) + _convolution(width, width, 3, side)
            if channels != width:
                layers += _convolution(channels, width, 1, side)
            channels = width
    return [*layers, Layer(channels * 10 + 10, channels * 10)]


def resnet50() -> list[Layer]:
    """Return those of ResNet-50 for CIFAR-100."""
    layers = [*_convolution(3, 64, 3, 32)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width, side = 64 << stage, 32 >> stage
        for block in range(blocks):
            before = side if block or not stage else 2 * side  # the second one has the stride
            layers += _convolution(channels, width, 1, before)
            layers += _convolution(width, width, 3, side) + _convolution(width, 4 * width, 1, side)
            if channels != 4 * width:
                layers += _convolution(channels, 4 * width, 1, side)
            channels = 4 * width
    return [*layers, Layer(channels * 100 + 100, channels * 100)]


def gpt2() -> list[Layer]:
    """Return those of GPT-2 small at 1024 tokens."""
    width, length, tokens = 768, 1024, 50257
    norm = Layer(2 * width, 2 * width)
    block = [
        norm,
        Layer(3 * width * width + 3 * width, 3 * width * width + length * width),  # and attention
        Layer(width * width + width, width * width),
        norm,
        Layer(4 * width * width + 4 * width, 4 * width * width),
        Layer(4 * width * width + width, 4 * width * width),
    ]
    embeddings = [Layer(tokens * width, 0), Layer(length * width, 0)]
    return [*embeddings, *12 * block, norm, Layer(tokens * width, tokens * width)]


def llama2() -> list[Layer]:
    """Return those of the 175M Llama-2 at 1024 tokens."""
    width, hidden, length, tokens = 512, 11008, 1024, 32000
    square = Layer(width * width, width * width)
    wide = Layer(width * hidden, width * hidden)
    norm = Layer(width, width)
    attention = [Layer(width * width, width * width + length * width), *3 * [square]]
    block = [norm, *attention, norm, *3 * [wide]]
    embedding = Layer(tokens * width, 0)
    return [embedding, *8 * block, norm, Layer(tokens * width, tokens * width)]


MODELS = {"ResNet-18": resnet18, "ResNet-50": resnet50, "GPT-2": gpt2, "Llama-2": llama2}


def _convolution(channels: int, width: int, size: int, side: int) -> list[Layer]:
    """Return a convolution whose output is `side` x `side`, and the batch norm behind it."""
    weights = size * size * channels * width
    return [Layer(weights, weights * side * side), Layer(2 * width, 2 * width * side * side)]
