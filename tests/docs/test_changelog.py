"""The changelog has this version, and every old spelling that still works."""

from __future__ import annotations

import ast

import dsx
from tests.docs.messages import sources
from tests.docs.pages import read


def renamed() -> list[str]:
    """Return the old spellings that the source warns of, where they are written out there."""
    found: list[str] = []
    texts = (path.read_text() for path in sources())
    for text in (text for text in texts if "warn_renamed(" in text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("warn_renamed"):
                old = node.args[0]
                if isinstance(old, ast.Constant):
                    found.append(str(old.value))
    return found


def test_it_has_this_version() -> None:
    is_released = ".dev" not in dsx.__version__
    heading = dsx.__version__ if is_released else "Unreleased"
    assert f"\n## [{heading}]" in read("CHANGELOG.md")


def test_it_names_every_old_spelling() -> None:
    assert len(renamed()) >= 3
    text = read("CHANGELOG.md")
    assert [old for old in renamed() if old not in text] == []
