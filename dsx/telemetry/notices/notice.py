"""What is told of a run: one thing that has happened, and the forms in which it is sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, Literal

Kind = Literal[
    "lost", "back", "left_out", "diverging", "not_saved", "not_copied", "finished", "ended"
]
Form = Literal["json", "slack"]

KINDS: dict[Kind, str] = {
    "lost": "clusters train no more: they are lost, or have left",
    "back": "clusters train again: they have healed, or are reached again",
    "left_out": "what a cluster sent went into no mean: not finite, far too large, or its bits are "
    "not those of the others",
    "diverging": "an alarm of the guard, a loss that is not finite, a cluster whose steps are all "
    "skipped, or training that has gone back to a checkpoint",
    "not_saved": "a checkpoint of one cluster could not be written; training goes on",
    "not_copied": "a checkpoint could not be copied to its remote place; training goes on",
    "finished": "training is finished",
    "ended": "it ended otherwise: by an error, a signal, `dsx ctl`, or without `finish()`",
}
ENDS: tuple[Kind, ...] = ("finished", "ended")
_MOST_LETTERS = 2000
_MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}  # what Slack reads as its own


@dataclass(frozen=True)
class Notice:
    """One thing that has happened, at `step`; `cluster` tells of it, `clusters` it is about.

    `run` names the run: its folder, or else its method; `time` is in seconds since 1970. `held`:
    how many there were of each kind that were not sent before this one.
    """

    kind: Kind
    text: str
    cluster: int
    clusters: tuple[int, ...]
    step: int
    run: str
    host: str
    time: float
    held: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def sentence(self) -> str:
        """What people read: of which run, what, and how much was not sent before."""
        text = f"dsx, {self.run}: {self.text}"
        if len(text) > _MOST_LETTERS:
            text = f"{text[:_MOST_LETTERS]}..."
        count = sum(self.held.values())
        if not count:
            return text
        named = ", ".join(f"{number} {kind}" for kind, number in sorted(self.held.items()))
        return f"{text} ({count} more before this were held back: {named})"

    def document(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        at = datetime.fromtimestamp(self.time, timezone.utc)
        return {
            "kind": self.kind,
            "text": self.sentence,
            "run": self.run,
            "step": self.step,
            "cluster": self.cluster,
            "clusters": [*self.clusters],
            "host": self.host,
            "time": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "held_back": dict(self.held),
        }

    def body(self, form: Form) -> bytes:
        """Return what is posted: all of it as JSON, or what Slack's incoming webhooks take."""
        if form == "json":
            return json.dumps(self.document()).encode()
        text = "".join(_MARKUP.get(letter, letter) for letter in self.sentence)
        return json.dumps({"text": text}).encode()
