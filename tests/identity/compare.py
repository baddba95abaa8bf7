"""Compare two files that record.py has written: a table, and every difference by name.

    python tests/identity/compare.py FIRST.json SECOND.json

Exits with 1 on any difference, also where one file's resumed runs are not its uninterrupted ones
or a part or a run is in one file only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from identity.differences import count, differences

ASPECTS = ("weights", "state", "records", "values")
Runs = dict[str, Any]


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 2:
        print("usage: compare.py FIRST.json SECOND.json", file=sys.stderr)
        return 2
    first, second = (json.loads(Path(path).read_text()) for path in arguments)
    found: list[str] = []
    for which, evidence in (("first", first), ("second", second)):
        print(f"{which}: " + ", ".join(f"{k} {v}" for k, v in evidence["about"].items()))
    if differences(first["about"]["torch"], second["about"]["torch"]):
        found.append("torch is another: record both files with the same")
    columns = "".join(f"{name:>10}" for name in ("runs", *ASPECTS, "compared"))
    print(f"{'part':<12}{columns}   (runs in which they are equal)")
    parts = [*first["parts"], *(p for p in second["parts"] if p not in first["parts"])]
    for part in parts:
        pair = [flat(evidence["parts"].get(part, {})) for evidence in (first, second)]
        row, named = compare(*pair)
        print(f"{part:<12}" + "".join(f"{value:>10}" for value in row))
        found += [f"{part} > {name}" for name in named]
    for name in found:
        print(name)
    print("equal" if not found else f"{len(found)} differences")
    return int(bool(found))


def flat(runs: Runs) -> Runs:
    """Return a part's runs with every resumed one as a run of its own."""
    found: Runs = {}
    for name, run in runs.items():
        found[name] = {aspect: run[aspect] for aspect in ASPECTS}
        if "resumed" in run:
            found[f"{name}, resumed"] = run["resumed"]
    return found


def compare(first: Runs, second: Runs) -> tuple[list[int], list[str]]:
    """Return a row of the table and the names of what differs."""
    names = [*first, *(name for name in second if name not in first)]
    equal, compared, found = dict.fromkeys(ASPECTS, 0), 0, []
    for name in names:
        if name not in first or name not in second:
            found.append(f"{name}: only in the {'second' if name not in first else 'first'} file")
            continue
        for aspect in ASPECTS:
            ours, theirs = first[name][aspect], second[name][aspect]
            named = differences(ours, theirs, f"{name} > {aspect}")
            compared += count(ours)
            equal[aspect] += not named
            found += named
        for which, run in (("first", first[name]), ("second", second[name])):
            unequal = run["values"].get("not as uninterrupted", [])
            found += [f"{name}, in the {which} file, not as uninterrupted: {n}" for n in unequal]
    return [len(names), *equal.values(), compared], found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
