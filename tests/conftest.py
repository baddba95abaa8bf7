"""Tests run on the CPU, also where there are GPUs; those marked `gpu` say so with -m gpu."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.templates import borrow_templates, lend_templates

hypothesis.settings.register_profile("dsx", deadline=None)  # on a busy machine all take longer
hypothesis.settings.load_profile("dsx")

# how the names of files begin that fork ranks with Megatron
MEGATRON = ("tests/engines/test_megatron", "tests/test_templates")


def pytest_configure(config: pytest.Config) -> None:
    tree = config.getoption("--megatron-lm")
    if tree and config.rootpath.resolve() != Path(__file__).resolve().parents[1]:
        # as pytest takes a word of its own for a place of tests, and reads that tree's settings
        raise pytest.UsageError(f"write --megatron-lm={tree}, in one word")
    if config.getoption("markexpr") != "gpu":
        os.environ.update(CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu")
    if hasattr(config, "workerinput"):
        borrow_templates(config.workerinput["templates"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Each of xdist's processes forks ranks from the same templates."""
    if not hasattr(node.config, "templates"):
        node.config.templates = lend_templates()
    node.workerinput["templates"] = node.config.templates


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes long goes first: where files are shared out, it must not be last.

    `-m ci` leaves out what is slow, also in files of which all else is for `ci`.
    """
    if config.getoption("markexpr") == "ci":
        slow = {item for item in items if item.get_closest_marker("slow")}
        items[:] = [item for item in items if item not in slow]
        config.hook.pytest_deselected(items=[*slow])

    def order(item: pytest.Item) -> tuple[bool, bool]:
        module = getattr(item, "module", None)
        has_ranks = hasattr(module, "run_distributed") or hasattr(module, "run_by_parts")
        return not item.nodeid.startswith(MEGATRON), not has_ranks

    items.sort(key=order)


def pytest_collection() -> None:
    gc.disable()  # what is imported stays, and each look through it takes longer than the last


def pytest_collection_finish() -> None:
    gc.enable()
    gc.collect()
    gc.freeze()  # a million objects of libraries that no later collection need look through


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: all files with Megatron's ranks to one process, which imports it."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler.loadfile import LoadFileScheduling

    class Files(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "megatron" if nodeid.startswith(MEGATRON) else super()._split_scope(nodeid)

    return Files(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-lm", metavar="PATH", help="a Megatron-LM tree for tests/launch/test_megatron_lm"
    )
    parser.addoption(
        "--apex", metavar="PATH", help="a tree of apex for tests/engines/test_distributed_adam"
    )
    parser.addoption(
        "--transformer-engine", metavar="PATH",
        help="an unpacked wheel of it, for tests/engines/test_real_transformer_engine",
    )  # fmt: skip
    parser.addoption(
        "--forked-ranks", action="store_true", help="fork them, instead of a torchrun per cluster"
    )
