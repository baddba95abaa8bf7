"""Tests run on the CPU, also where there are GPUs; those marked `gpu` say so with -m gpu."""

from __future__ import annotations

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("markexpr") != "gpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with several ranks first: where files are shared out, a long one must not be last."""
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "run_distributed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-lm", metavar="PATH", help="a Megatron-LM tree for tests/launch/test_megatron_lm"
    )
