"""What launches and applies take of the training thread, for each element of a rank.

Masters are read, the outer step is taken, masters are written: work that no overlap hides, where
the state is on the host. `dsx bench overhead` measures it, and with `--model` writes
launch_cost.json, which plans are made with.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dsx.plan.published.scenario import require_number

_FILE = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class LaunchCost:
    """Seconds of one thread per element, launch and apply together, and how they were measured."""

    seconds_per_element: float
    command: str
    host: str

    def write(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


@cache
def launch_cost() -> LaunchCost:
    """Return the one that comes with dsx."""
    return LaunchCost(**json.loads(_FILE.read_text()))


def read_launch_figures(figures: Any) -> float:
    """Return the training thread's seconds per element at launch and apply, of the largest size.

    Of what `dsx bench overhead --json` wrote, with the slowest codec; ValueError for anything else.
    """
    try:
        most = max(int(figure["numel"]) for figure in figures)
        own = [figure for figure in figures if figure["numel"] == most]
        seconds = max(1e-3 * (float(f["launch_ms"]) + float(f["apply_ms"])) for f in own) / most
    except (KeyError, TypeError, OverflowError, ValueError, ZeroDivisionError) as error:
        raise ValueError(
            f"launch figures must be a list of objects with numel, launch_ms and apply_ms "
            f"({error!r}); write it by dsx bench overhead --json"
        ) from None
    require_number("the training thread's seconds per element", seconds, 0, 1)
    return seconds
