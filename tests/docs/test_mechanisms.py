"""Tables "mechanism by mechanism" of the papers' pages: what they name is there, and says what."""

from __future__ import annotations

import ast
import dataclasses
import re
from functools import cache
from typing import Any, NamedTuple

import pytest

from dsx.config.sections import Block
from dsx.method.choices import AXES
from tests.docs.pages import ROOT, read

PAPERS = ("cocodc", "dilocox", "eager", "dreamddp", "co2")
HEADING = "## Mechanism by mechanism"
VERDICTS = ("same", "different", "decided", "not there")


class Mechanism(NamedTuple):
    name: str
    paper: str
    where: str
    here: str


def mechanisms(page: str) -> list[Mechanism]:
    text = read(f"docs/methods/{page}.md").split(HEADING + "\n")[1].split("\n## ")[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [Mechanism(*(cell.strip() for cell in row.strip("|").split("|"))) for row in rows]


@cache
def names_in(path: str) -> frozenset[str]:
    """Every class, function and assigned name of a program; those in classes as `Class.name`."""
    file = ROOT / path
    is_program = file.suffix == ".py" and file.is_file()
    return frozenset(_names(ast.parse(file.read_text()), "")) if is_program else frozenset()


def _names(node: Any, prefix: str) -> list[str]:
    found: list[str] = []
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            found.append(prefix + child.name)
        if isinstance(child, ast.ClassDef):
            found += _names(child, f"{prefix}{child.name}.")
        targets = child.targets if isinstance(child, ast.Assign) else []
        targets += [child.target] if isinstance(child, ast.AnnAssign) else []
        found += [prefix + target.id for target in targets if isinstance(target, ast.Name)]
    return found


def is_key(name: str) -> bool:
    """Whether it is a key of the "dsx" block."""
    section, _, key = name.partition(".")
    if section in AXES:
        selector, choices = AXES[section]
        fields = {f.name for kind in choices.values() for f in dataclasses.fields(kind)}
        return key in fields | {selector}
    model = Block.model_fields.get(section)
    return model is not None and key in getattr(model.annotation, "model_fields", {})


def lacking(where: str) -> list[str]:
    """Return what of a cell is not there: a path, a symbol of the path before it, or a key."""
    missed: list[str] = []
    path = ""
    for name in re.findall(r"`([^`]+)`", where):
        if "/" in name:
            path = name
            if not (ROOT / path).is_file():
                missed.append(path)
        elif not is_key(name) and name not in names_in(path):
            missed.append(f"{path} {name}")
    return missed


@pytest.mark.parametrize("page", PAPERS)
def test_every_place_exists(page: str) -> None:
    found = mechanisms(page)
    assert len(found) >= 15
    assert [miss for row in found for miss in lacking(row.where)] == []


@pytest.mark.parametrize("page", PAPERS)
def test_every_mechanism_has_a_verdict_and_a_place(page: str) -> None:
    for row in mechanisms(page):
        assert row.here.startswith(VERDICTS), row
        assert row.where or row.here.startswith("not there"), row
        assert row.name and row.paper, row
        if row.here.startswith(("different", "decided")):
            assert len(row.here) > len("different") + 5, f"{row.name}: why?"


def test_what_is_not_there_is_found_to_be_missing() -> None:
    assert lacking("`dsx/nowhere.py` `Nothing`; `delay.step`; `dsx/outer/loop.py` `Loop`") == [
        "dsx/nowhere.py", "dsx/nowhere.py Nothing", "dsx/nowhere.py delay.step",
        "dsx/outer/loop.py Loop",
    ]  # fmt: skip
    assert lacking("`dsx/outer/loop.py` `OuterLoop.start`; `delay.steps`; `state.device`") == []
