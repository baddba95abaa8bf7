"""Which kernels codecs run, what the log says of it, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from dsx.compress.wire import compiled, kernel_choice
from dsx.compress.wire.formats import FORMATS, Int4, Int8, decoding_work
from dsx.compress.wire.native import library
from tests.compress.wire.installed_kernels import native  # noqa: F401  # pyright: ignore

CPU = torch.device("cpu")
MISSING = "they were not built: no C compiler was there at installation, or it failed"


@pytest.fixture(autouse=True)
def announced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_choice, "_announced", set())
    yield


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installation whose library was not built: its folder has none."""
    look_again(monkeypatch, tmp_path)
    yield
    monkeypatch.undo()
    forget()


def look_again(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
    forget()


def forget() -> None:
    for asked in (library._found, library.unavailable, library.instruction_sets):
        asked.cache_clear()


@pytest.mark.usefixtures("native")
def test_auto_takes_native_kernels_for_vectors_of_any_length(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        assert {Int4().codec(n, CPU).kernels for n in (0, 10, 2**25)} == {"native"}
        assert Int4().codec(10, CPU, "native").kernels == "native"
        assert Int4().codec(10, CPU, "eager").kernels == "eager"
    best = library.instruction_sets()[-1]
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("INFO", f"int4 on cpu: native kernels ({best})"),
        ("INFO", "int4 on cpu: eager kernels (asked for)"),
    ]


@pytest.mark.usefixtures("without")
def test_without_the_library_auto_compiles_long_vectors_and_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "unavailable", lambda device: None)
    with caplog.at_level(logging.INFO):
        assert Int4().codec(16 * 2**20, CPU).kernels == "compiled"
        assert Int4().codec(16 * 2**20 - 1, CPU).kernels == "eager"
        assert Int4().codec(10, CPU).kernels == "eager"
    assert [(record.levelname, record.message) for record in caplog.records] == [
        ("WARNING", f"int4 on cpu: compiled kernels (native ones are not there: {MISSING}; "
         "a compiler works)"),
        ("WARNING", f"int4 on cpu: eager kernels (native ones are not there: {MISSING}; "
         "16777215 elements are fewer than 16777216, from where compiling pays)"),
    ]  # fmt: skip


@pytest.mark.usefixtures("without")
def test_kernels_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(compiled, "unavailable", lambda device: "no g++")
    with pytest.raises(RuntimeError, match=r"'compiled' cannot be had on cpu: no g\+\+; install"):
        Int8().codec(10, CPU, "compiled")
    with pytest.raises(RuntimeError, match=f"'native' cannot be had on cpu: {MISSING}; install"):
        Int8().codec(10, CPU, "native")
    with caplog.at_level(logging.INFO):
        assert Int8().codec(2**25, CPU).kernels == "eager"
    assert "nothing can be compiled on cpu: no g++" in caplog.text


def test_native_kernels_are_of_the_cpu() -> None:
    with pytest.raises(RuntimeError, match="'native' cannot be had on cuda: they run on the CPU"):
        kernel_choice.choose_kernels("int4", 10, "cuda", "native")


def test_a_library_that_cannot_be_loaded_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / f"{library.STEM}{EXTENSION_SUFFIXES[0]}").write_bytes(b"of another machine")
    look_again(monkeypatch, tmp_path)
    try:
        assert "cannot be loaded" in str(library.unavailable())
        with pytest.raises(RuntimeError, match="the native kernels cannot be called: kernels"):
            library.instruction_sets()
    finally:
        monkeypatch.undo()
        forget()


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("name", library.KINDS)
def test_native_kernels_work_in_nothing_and_plans_know(name: str) -> None:
    wire = FORMATS[name]()
    assert wire.work(2**20) == wire.work(2**20, "native") == decoding_work(wire, 2**20) == {}
    assert wire.work(2**20, "eager") == wire.work(2**20, "compiled") != {}


@pytest.mark.usefixtures("without")
def test_plans_count_what_eager_kernels_work_in_without_the_library() -> None:
    assert Int4().work(2**20) == Int4().work(2**20, "eager") != {}
