"""Every message has its anchor in docs/troubleshooting.md; `DSX_WRITE_DOCS=1` writes the list."""

from __future__ import annotations

import os
import re
from itertools import groupby

from tests.docs.messages import Message, classes, messages, sources
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
BEGIN, END = "<!-- messages: begin -->\n", "<!-- messages: end -->\n"


def explained() -> dict[str, str]:
    """Return the anchor of the section that explains it, by the phrases it quotes."""
    found: dict[str, str] = {}
    for section in re.split(r"^### ", PAGE.read_text().split("## Every message")[0], flags=re.M):
        anchor = re.search(r"\{ #([\w-]+) \}", section)
        for quote in re.findall(r"^> (.*)$", section, re.M):
            assert anchor
            found.update({phrase: anchor[1] for phrase in re.findall(r"`([^`]+)`", quote)})
    return found


def written() -> str:
    """Return the list, by areas; a second message with the same first words has a number."""
    phrases, seen = explained(), dict[str, int]()
    lines: list[str] = []
    for area, group in groupby(messages(), key=lambda message: message.area):
        lines += [f"### {area}", ""]
        for message in group:
            seen[message.anchor] = seen.get(message.anchor, 0) + 1
            count = seen[message.anchor]
            anchor = message.anchor if count == 1 else f"{message.anchor}-{count}"
            lines.append(f"- {_code(message)}{{ #{anchor} }} {_kind(message, phrases)}")
        lines.append("")
    return "\n".join(lines)


def _code(message: Message) -> str:
    fence = "``" if "`" in message.text else "`"
    pad = " " if fence == "``" else ""
    return f"{fence}{pad}{message.text}{pad}{fence}"


def _kind(message: Message, phrases: dict[str, str]) -> str:
    see = next((anchor for phrase, anchor in phrases.items() if phrase in _plain(message.text)), "")
    return f"{message.kind}" + (f", [explained](#{see})" if see else "")


def _plain(text: str) -> str:
    return text.replace("`", "")


def test_every_message_has_its_anchor() -> None:
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    now, after = rest.split(END)
    wanted = written()
    if os.environ.get("DSX_WRITE_DOCS"):
        now = wanted
        PAGE.write_text(before + BEGIN + now + END + after)
    lines, wanted_lines = set(now.splitlines()), set(wanted.splitlines())
    missing, gone = sorted(wanted_lines - lines), sorted(lines - wanted_lines)
    assert (missing, gone) == ([], []), "write it anew: DSX_WRITE_DOCS=1 pytest tests/docs"
    anchors = re.findall(r"\{ #([\w-]+) \}", PAGE.read_text())
    assert len(anchors) == len(set(anchors)) and len(messages()) > 300


def test_every_class_is_explained() -> None:
    anchors = set(re.findall(r"\{ #([\w-]+) \}", PAGE.read_text()))
    assert {name for name in classes() if name.lower() not in anchors} == set()


def test_quoted_phrases_are_said_somewhere() -> None:
    """In a message or a piece of one; a phrase that nobody says explains nothing."""
    joined = "".join(_plain(path.read_text()) for path in sources())
    source = re.sub(r'"\s*f?"', "", joined)  # strings that go on in the next line
    whole = "\n".join(_plain(message.text) for message in messages())
    silent = [phrase for phrase in explained() if phrase not in whole and phrase not in source]
    assert silent == []
