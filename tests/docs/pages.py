"""The pages that a reader sees, and the fenced blocks in them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(
    r'^```(?P<language>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """One fenced block: `sh`, `python`, `json`, `toml`, `text` (what is printed, and formulas)."""

    page: str
    line: int
    language: str
    title: str | None
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of an `sh` block, continued lines joined, comments at their ends gone."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [re.sub(r"\s+", " ", re.sub(r"\s+#\s.*$", "", line)).strip() for line in lines]


def pages() -> list[str]:
    """Every page, as a path from the root of the checkout."""
    top = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
    docs = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))
    return [*top, *docs]


def read(page: str) -> str:
    return (ROOT / page).read_text()


def hold(page: str, name: str, wanted: str) -> None:
    """Hold what is between a page's marks to `wanted`; `DSX_WRITE_DOCS=1` writes it."""
    begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->\n"
    before, rest = read(page).split(begin)
    now, after = rest.split(end)
    if os.environ.get("DSX_WRITE_DOCS"):
        (ROOT / page).write_text(before + begin + wanted + end + after)
        return
    assert now == wanted, "write it anew: DSX_WRITE_DOCS=1 pytest tests/docs"


def hold_served(page: str, first: str, table: Sequence[tuple[str, str, str]]) -> None:
    """Hold a page's table of what is served to the code's, whose `first` column is named so."""
    rows = [(first, "dsx", ""), ("---", "---", "---")]
    rows += [(f"`{name}`", *rest) for name, *rest in table]
    hold(page, "served", "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n")


def blocks(page: str) -> list[Block]:
    text = read(page)
    return [
        Block(page, text[: m.start()].count("\n") + 1, m["language"], m["title"], m["text"])
        for m in _FENCE.finditer(text)
    ]


def prose(page: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", read(page))
