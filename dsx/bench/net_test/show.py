"""What cluster 0 prints after `dsx net-test`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsx.bench.net_test.advice import Model, Plan
from dsx.bench.net_test.figures import Figures


def show(figures: Figures, model: Model, plans: list[Plan], console: Console) -> None:
    """Print round trips, bandwidths, the best number of streams, and what it means for H."""
    console.print(_round_trips(figures))
    console.print(_bandwidths(figures))
    console.print(
        f"measured as a run with this goes: transport {figures.transport}, "
        f"security {figures.security}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    best = figures.best
    console.print(
        f"link.streams: {best.streams}. An all-reduce then sends {_mbits(best.bits_per_second)} "
        f"Mbit/s from each cluster; latency {1e3 * figures.latency_seconds:.3g} ms one way.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(
        f"least H for {model.target:g} % of the time spent computing, {model.params:.4g} "
        f"parameters, {model.layers} layers, {model.step_seconds:g} s per step",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(_plans(plans))


def _round_trips(figures: Figures) -> Table:
    table = Table("clusters", title="round trip, ms", title_justify="left")
    for name in ("median", "least", "pings"):
        table.add_column(name, justify="right")
    for each in figures.round_trips:
        a, b = each.clusters
        median, least = 1e3 * each.median_seconds, 1e3 * each.min_seconds
        table.add_row(f"{a} - {b}", f"{median:.3f}", f"{least:.3f}", str(each.count))
    return table


def _bandwidths(figures: Figures) -> Table:
    streams = [each.streams for each in figures.all_reduce]
    table = Table("streams", title="payload, Mbit/s", title_justify="left")
    for n in streams:
        table.add_column(str(n), justify="right")
    rates = {(e.from_cluster, e.to_cluster, e.streams): e for e in figures.pairs}
    directions = list(dict.fromkeys((a, b) for a, b, _ in rates))
    for a, b in directions:
        row = [_mbits(rates[a, b, n].one_way_bits_per_second) for n in streams]
        table.add_row(f"{a} to {b}", *row)
    table.add_section()
    for a, b in directions:
        if a < b:
            row = [_mbits(rates[a, b, n].both_ways_bits_per_second) for n in streams]
            table.add_row(f"{a} and {b} at once, each", *row)
    table.add_section()
    table.add_row("all-reduce, each", *[_mbits(e.bits_per_second) for e in figures.all_reduce])
    return table


def _plans(plans: list[Plan]) -> Table:
    table = Table("method")
    for name in ("H", "utilization"):
        table.add_column(name, justify="right")
    for plan in plans:
        if plan.interval is None or plan.utilization is None:
            table.add_row(plan.method, "above 1e6", "-")
        else:
            table.add_row(plan.method, str(plan.interval), f"{100 * plan.utilization:.1f} %")
    return table


def _mbits(bits_per_second: float) -> str:
    mbits = bits_per_second / 1e6
    return f"{mbits:.4g}" if mbits < 1000 else f"{mbits:,.0f}"
