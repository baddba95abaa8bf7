"""What `dsx simulate` prints: the bandwidths that targets need, or what a bandwidth gives."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dsx.core.units import format_bytes
from dsx.plan.published.closed_forms import transfer_seconds
from dsx.plan.published.dag import elapsed_seconds
from dsx.plan.published.scenario import Scenario, require_number
from dsx.plan.published.search import exactly, on_paper_grid, require_target

DEFAULT_TARGETS = "50,80,90,95,99"
_DAY = 86400.0


def read_targets(text: str) -> list[float]:
    """Read percentages with commas between them; ValueError for what is none."""
    targets: list[float] = []
    for part in text.split(","):
        try:
            percent = float(part)
        except ValueError:
            raise ValueError(
                f"targets={text!r} must be percentages with commas between them; try "
                f"{DEFAULT_TARGETS}"
            ) from None
        require_target(percent)
        targets.append(percent)
    return targets


def show_targets(
    scenario: Scenario,
    targets: list[float],
    is_paper_grid: bool,
    remarks: list[str],
    as_json: bool,
    console: Console,
) -> None:
    """Print the least bandwidth for every target, and what else is to be said."""
    search = on_paper_grid if is_paper_grid else exactly
    found = search(scenario, targets)
    if as_json:
        record = {
            "min_gbps": [each.gbps for each in found],
            "targets": targets,
            "notes": [each.note for each in found],
            "is_paper_grid": is_paper_grid,
            "remarks": remarks,
            **_of_round(scenario),
        }
        console.print_json(json.dumps(record))
        return
    _print_scenario(scenario, remarks, console)
    title = "last point of the papers' grid below it" if is_paper_grid else "least bandwidth for it"
    table = Table("utilization", title=title, title_justify="left")
    table.add_column("Gbit/s", justify="right")
    has_notes = any(each.note for each in found)
    if has_notes:
        table.add_column("note")
    for target, each in zip(targets, found, strict=True):
        if each.gbps is None:
            number = "-"
        else:
            number = f"{each.gbps:.1f}" if is_paper_grid else f"{each.gbps:.4g}"
        table.add_row(f"{target:g} %", number, *([each.note] if has_notes else []))
    console.print(table)


def show_bandwidth(
    scenario: Scenario, gbps: float, remarks: list[str], as_json: bool, console: Console
) -> None:
    """Print what a line of `gbps` gives, and what else is to be said."""
    require_number("gbps", gbps, 1e-9, 1e9)
    elapsed = float(elapsed_seconds(scenario, np.array([gbps * 1e9]))[0])
    round_seconds = elapsed / scenario.rounds
    exposed = max(round_seconds - scenario.compute_seconds, 0.0)
    record: dict[str, Any] = {
        "utilization": min(scenario.compute_seconds / round_seconds, 1.0),
        "bytes_per_round": scenario.bytes_per_round,
        "exposed_seconds": exposed,
        "gbps": gbps,
        "round_seconds": round_seconds,
        "transfer_seconds": transfer_seconds(scenario, gbps * 1e9),
        "bytes_per_day": scenario.bytes_per_round * _DAY / round_seconds,
        "remarks": remarks,
        **_of_round(scenario),
    }
    if as_json:
        console.print_json(json.dumps(record))
        return
    _print_scenario(scenario, remarks, console)
    table = Table(title=f"on a line of {gbps:g} Gbit/s", title_justify="left", show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("utilization", f"{100 * record['utilization']:.2f} %")
    table.add_row("compute per round", f"{scenario.compute_seconds:.4g} s")
    table.add_row("transfers per round", f"{record['transfer_seconds']:.4g} s")
    table.add_row("of that exposed", f"{exposed:.4g} s")
    table.add_row("sent per round and cluster", format_bytes(scenario.bytes_per_round, 4))
    table.add_row("sent per day and cluster", format_bytes(record["bytes_per_day"], 4))
    console.print(table)


def _of_round(scenario: Scenario) -> dict[str, Any]:
    return {
        "bytes_per_round": scenario.bytes_per_round,
        "steps_per_round": scenario.steps_per_round,
        "num_fragments": len(scenario.fragments),
        "compute_seconds": scenario.compute_seconds,
    }


def _print_scenario(scenario: Scenario, remarks: list[str], console: Console) -> None:
    compute, sync, wire = scenario.compute, scenario.sync, scenario.wire
    console.print(
        f"{compute.params:.4g} parameters, {compute.layers} layers, {compute.step_seconds:g} s of "
        f"compute per step; {wire.clusters} clusters",
        highlight=False,
        soft_wrap=True,
    )
    how = {
        "data_parallel": "the whole model in every step",
        "wfbp": f"the whole model in every step, in {len(scenario.fragments)} buckets",
        "asc_wfbp": "the whole model in every step, start-ups at once",
        "diloco": f"the whole model every {sync.interval} steps",
        "streaming": f"one of {len(scenario.fragments)} fragments every {scenario.launch_every} "
        f"steps, so all of them in {scenario.steps_per_round}",
    }[sync.method]
    steps = f"{sync.overlap_steps} step{'' if sync.overlap_steps == 1 else 's'}"
    hidden = f"behind {steps}" if sync.overlap_steps else "not overlapped with further steps"
    console.print(
        f"{sync.method}: {how}, {wire.bits:g} bits per parameter, {hidden}",
        highlight=False,
        soft_wrap=True,
    )
    for remark in remarks:
        console.print(remark, highlight=False, soft_wrap=True)
