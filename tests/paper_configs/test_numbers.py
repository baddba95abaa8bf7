"""Every number in configs/paper is one that its paper has, or one with a reason."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.paper_configs.numbers import PUBLISHED, decided
from tests.paper_configs.settings import FILES, FOLDER, given, name_of, read

SUFFIXES = (".json", ".flags")
APPROXIMATE = {"parameters": 0.02, "tokens": 1e-3, "tokens_per_step": 0.02}


def identify(file: Path) -> str:
    return str(file.relative_to(FOLDER))


def test_every_file_is_in_the_table_and_every_run_of_it_has_one() -> None:
    assert {name_of(file) for file in FILES} == set(PUBLISHED)
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_what_the_paper_says_is_what_the_file_says(file: Path) -> None:
    _, rows = PUBLISHED[name_of(file)]
    settings, missed = read(file), []
    for name, value, section in rows:
        if name not in settings:
            missed.append(name)
        elif isinstance(value, float):
            near = APPROXIMATE.get(name, 0)
            assert math.isclose(settings[name], value, rel_tol=near), (name, section)
        else:
            assert settings[name] == value, (name, section)
    # a DeepSpeed JSON does not say how many accelerators there are, nor Megatron its optimizer;
    # a z-loss of the head is not among its flags
    only_flags = {"parameters", "ranks", "tensor"}
    only_json = {"zero", "optimizer", "z_loss"}
    assert set(missed) <= (only_flags if file.suffix == ".json" else only_json)


@pytest.mark.parametrize("file", FILES, ids=identify)
def test_what_the_paper_does_not_say_has_a_reason(file: Path) -> None:
    published = {name for name, *_ in PUBLISHED[name_of(file)][1]}
    without = set(given(file)) - published - set(decided(file.parent.name))
    # what a method's own blocks repeat for clarity
    assert without <= {"schedule", "compression", "factor_wire"}, without


@pytest.mark.parametrize(
    "name", [n for n in PUBLISHED if all((FOLDER / f"{n}{s}").exists() for s in SUFFIXES)]
)
def test_json_and_flags_of_a_run_agree(name: str) -> None:
    ours, theirs = (read(FOLDER / f"{name}{suffix}") for suffix in SUFFIXES)
    both: set[Any] = set(ours) & set(theirs)
    assert len(both) > 15
    for key in sorted(both):
        if isinstance(ours[key], float):
            assert math.isclose(ours[key], theirs[key]), key
        else:
            assert ours[key] == theirs[key], key


def test_the_arithmetic_of_dilocox_is_as_printed() -> None:
    """500x and 1,000x (Sec. 4.1.3) are H times what int4 saves of FP16, and factors the rest."""
    qwen = read(FOLDER / "dilocox/qwen_107b_pp80.flags")
    saved = qwen["hidden"] * qwen["hidden"] / (2 * qwen["hidden"] * qwen["rank"])  # square: 2x
    assert qwen["H"] * 4 * saved == 1000
