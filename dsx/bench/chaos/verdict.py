"""What a run with faults has come to: counts, and what is not as it should be."""

from __future__ import annotations

from dataclasses import dataclass, field

_MOST_TOLD = 5  # of one thing


@dataclass
class Verdict:
    """Counts, and pauses in seconds; `problems` says in words what is not as it should be."""

    rounds: int = 0
    rounds_lost: int = 0
    rounds_refused: int = 0
    events: dict[str, int] = field(default_factory=dict[str, int])
    joins: int = 0
    mismatches: int = 0
    pause_median_seconds: float | None = None
    pause_max_seconds: float | None = None
    samples: int = 0
    samples_lost: int = 0
    samples_twice: int = 0
    loss: float | None = None
    problems: list[str] = field(default_factory=list[str])

    @property
    def is_good(self) -> bool:
        """Whether nothing was lost, and all held the same."""
        is_lost = self.rounds_lost or self.samples_lost or self.samples_twice
        return not (self.mismatches or is_lost or self.problems)

    def tell(self, problems: list[str]) -> None:
        """Add some of one kind: a few of them, and how many more there are."""
        self.problems += problems[:_MOST_TOLD]
        if (more := len(problems) - _MOST_TOLD) > 0:
            self.problems.append(f"... and {more} more like the last one")
