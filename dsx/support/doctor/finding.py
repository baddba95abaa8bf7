"""A line of `dsx doctor`: a mark, what it is about, and in words what was found."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import Literal, NamedTuple

Mark = Literal["ok", "note", "STOP"]
_INDENT = 20


class Finding(NamedTuple):
    """What was found; a STOP would stop a run, and its text ends with the fix."""

    mark: Mark
    subject: str
    text: str

    def lines(self, width: int) -> list[str]:
        """Return it as it is printed, at most so many columns wide; commands stay whole."""
        first, *more = textwrap.wrap(
            self.text, max(width - _INDENT, 40), break_long_words=False, break_on_hyphens=False
        ) or [""]
        head = f"{self.mark:<6}{self.subject:<{_INDENT - 6}}{first}".rstrip()
        return [head, *(" " * _INDENT + line for line in more)]


def is_stopped(findings: Iterable[Finding]) -> bool:
    """Whether one of them would stop a run."""
    return any(finding.mark == "STOP" for finding in findings)
