"""What `dsx plan` prints: what was read, the ways of running in order, the best one's settings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from dsx.compress.low_rank import LowRank
from dsx.config.files import require_place
from dsx.core.units import format_bytes
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.plan.bill_table import cells, explain_bills, headings, money
from dsx.plan.budget import Budget, bill_of, data_parallel_bill
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Question, Search
from dsx.plan.coding_cores import cores_needed, in_words, with_cores
from dsx.plan.expected_loss import ExpectedLoss, expected_loss, explain
from dsx.plan.offer import block_of, flags_of
from dsx.plan.question import Read
from dsx.plan.ranking import best_of_each, harm, ranked

_SCALES_WITH_H = (Periodic, Streaming)  # others would send more in a longer period


@dataclass(frozen=True)
class Outputs:
    """How many presets are shown, and where."""

    top: int | None = None
    as_json: bool = False
    json_file: Path | None = None
    plot: Path | None = None

    def __post_init__(self) -> None:
        require_place("--json-file", self.json_file)
        require_place("--plot", self.plot)


def show_plan(read: Read, outputs: Outputs, console: Console) -> bool:
    """Search, and print a table or JSON; return whether the target is reached."""
    search = Search(read.question)
    candidates = ranked(search.candidates(), read.question)
    rows = best_of_each(ranked(with_cores(best_of_each(candidates), search), read.question))
    rows = rows[: outputs.top]
    is_reached = _meets(rows[0], read.question)
    if outputs.as_json or outputs.json_file:
        text = json.dumps(_record(read, search, rows), indent=2)
        if outputs.json_file:
            outputs.json_file.write_text(text + "\n")
        if outputs.as_json:
            typer.echo(text)
    if outputs.plot:
        _plot(search, rows, outputs.plot)
    if outputs.as_json:
        return is_reached
    _print_question(read, search, console)
    _print_table(read, search, rows, console)
    for line in in_words(rows[0], search):
        _say(console, line)
    if is_reached:
        _print_offer(rows[0], read.question, console)
    else:
        for line in _what_would(search, candidates):
            _say(console, line)
    return is_reached


def _plot(search: Search, rows: Sequence[Candidate], path: Path) -> None:
    """Draw utilization against bandwidth, a line per preset at its settings."""
    from matplotlib.figure import Figure

    question = search.question
    centre = question.link.bits_per_second
    rates = [centre * 10 ** (exponent / 10) for exponent in range(-20, 21)]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for row in rows:
        reached = [100 * search.at(row, rate).utilization for rate in rates]
        label = f"{row.preset}, H={row.interval}, {_codec(row)}"
        axes.plot([rate / 1e9 for rate in rates], reached, label=label)
    axes.axvline(centre / 1e9, color="0.6", linestyle=":")
    axes.axhline(100 * question.target, color="0.6", linestyle=":")
    axes.set_xscale("log")
    axes.set_xlabel("Gbit/s of one cluster's line, each way")
    axes.set_ylabel("utilization, %")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _print_question(read: Read, search: Search, console: Console) -> None:
    question, model = read.question, read.question.model
    stages = f" in {len(model.stages)} pipeline stages" if len(model.stages) > 1 else ""
    _say(
        console,
        f"{model.numel:.4g} parameters{stages}; {question.num_clusters} clusters of {model.ranks} "
        f"ranks; {question.step_seconds:.4g} s of compute per step",
    )
    for fact in read.facts:
        _say(console, fact)
    found = search.data_parallel()
    reached = (
        f"data parallel over this line would compute {100 * found.utilization:.3g} % of the time"
    )
    bill = data_parallel_bill(found, question, read.budget)
    costs = [f"{bill.days:.4g} days"] if bill.days is not None else []
    if bill.price is not None:
        costs.append(f"{money(bill.price)}{' a day' if bill.days is None else ''}")
    _say(console, ", and take ".join([reached, " and ".join(costs)]) if costs else reached)


def _print_table(read: Read, search: Search, rows: Sequence[Candidate], console: Console) -> None:
    question, budget = read.question, read.budget
    title = f"for {100 * question.target:g} % of the time computing, least harm first"
    table = Table(title=title, title_justify="left")
    table.add_column("preset", no_wrap=True)
    first = ("H", "frag-\nments", "tau", "codec", "util.\n%", "exposed\ns", "sent per\nround")
    last = ("sent per\nday", "outer\nmemory", "least\nGbit/s", "harm", "loss\n%")
    for heading in (*first, *last, *headings(budget)):
        table.add_column(heading, justify="right", no_wrap=True)
    bills = [bill_of(row, question, budget) for row in rows]
    losses = [_expected(row, question) for row in rows]
    for row, loss, bill in zip(rows, losses, bills, strict=True):
        found, device, host = row.prediction, row.on_device, row.on_host
        least = search.least_bits_per_second(row)
        table.add_row(
            row.preset,
            str(row.interval),
            str(row.num_fragments),
            _delay(row),
            _codec(row),
            f"{math.floor(1e4 * found.utilization) / 100:.2f}",
            f"{found.exposed_seconds:.3g}",
            format_bytes(found.bytes_per_round),
            format_bytes(row.bytes_per_day),
            f"{format_bytes(device, binary=True)} + {format_bytes(host, binary=True)}"
            + ("" if row.is_fitting else " (!)"),
            "-" if least is None else f"{least / 1e9:.3g}",
            f"{harm(row):.1f}",
            str(loss or "-"),
            *cells(bill, budget),
        )
    console.width = max(console.width, 142 + 11 * len(headings(budget)))
    console.print(table)
    _say(
        console,
        "tau: steps, or rounds. outer memory: per rank, on the accelerator and on its host. least "
        "Gbit/s: for the target\nat this H. harm: doublings of H, of delay, and of what a codec "
        "loses (dsx/plan/ranking.py)",
    )
    for line in explain([loss for loss in losses if loss is not None]):
        _say(console, line)
    for line in explain_bills(budget, question, bills):
        _say(console, line)
    if any(not row.is_fitting for row in rows):
        _say(console, "(!) beyond --memory-limit even with outer state on the host")
    for row in rows:
        codec = row.method.compression
        if isinstance(codec, LowRank) and codec.dense_rounds:
            moves = ", and moves H and the rank later" if row.codec.rank else ""
            rounds = f"{row.preset} sends its first {codec.dense_rounds} rounds in {codec.wire}"
            _say(console, rounds + moves)
    for reason in search.left_out:
        _say(console, reason)


def _expected(row: Candidate, question: Question) -> ExpectedLoss | None:
    numel = question.model.numel
    return expected_loss(row.preset, row.interval, question.num_clusters, numel)


def _print_offer(best: Candidate, question: Question, console: Console) -> None:
    block = block_of(best, question)
    _say(console, "\nthe first, in a DeepSpeed JSON:")
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in block.items())
    _say(console, f'"dsx": {{\n{lines}\n}}')
    _say(console, "or as Megatron's flags:")
    _say(console, flags_of(block))


def _what_would(search: Search, candidates: Sequence[Candidate]) -> list[str]:
    """Return what would reach the target: a better line, a longer H, a stronger codec."""
    question = search.question
    lines = [
        f"no preset reaches {100 * question.target:g} % with H up to {question.max_interval}"
        + ("" if question.memory_limit is None else " in the memory there is")
        + "; what would:"
    ]
    fitting = with_cores(best_of_each(row for row in candidates if row.is_fitting), search)
    if not fitting:
        return [*lines, "- more memory: see (!) above, raise --memory-limit"]
    rates = [(search.least_bits_per_second(row), row) for row in fitting]
    known = [(rate, row) for rate, row in rates if rate is not None]
    if known:
        rate, row = min(known, key=lambda pair: pair[0])
        lines.append(
            f"- a line of {rate / 1e9:.3g} Gbit/s: {row.preset}, H={row.interval}, {_codec(row)}"
        )
    plain = [r for r in fitting if isinstance(r.method.schedule, _SCALES_WITH_H)]
    waits = [(search.least_interval(row), row) for row in plain]
    longer = [(interval, row) for interval, row in waits if interval is not None]
    if longer:
        interval, row = min(longer, key=lambda pair: pair[0])
        lines.append(f"- H of {interval} (--max-interval): {row.preset} in {_codec(row)}")
    if question.model.hidden is None:
        lines.append("- a stronger codec: low rank, which --hidden lets the plan consider")
    else:
        lines.append("- a stronger codec: 2bit (0.28 bytes per element), 1bit or top_k (0.028)")
    return lines


def _record(read: Read, search: Search, rows: Sequence[Candidate]) -> dict[str, Any]:
    question = read.question
    return {
        "parameters": question.model.numel,
        "ranks": question.model.ranks,
        "num_clusters": question.num_clusters,
        "step_seconds": question.step_seconds,
        "target": 100 * question.target,
        "link": asdict(question.link),
        "facts": read.facts,
        "data_parallel_utilization": search.data_parallel().utilization,
        "budget": vars(read.budget),
        "candidates": [_candidate(row, search, read.budget) for row in rows],
        "left_out": search.left_out,
        "is_target_reached": _meets(rows[0], question),
    }


def _candidate(row: Candidate, search: Search, budget: Budget) -> dict[str, Any]:
    least = search.least_bits_per_second(row)
    block = block_of(row, search.question)
    expected = _expected(row, search.question)
    needed = None if row.coding_cores is None else cores_needed(row, search)
    return {
        "preset": row.preset,
        "interval": row.interval,
        "num_fragments": row.num_fragments,
        "overlap_steps": row.overlap_steps,
        "rounds_late": row.method.delay.rounds_under_way,
        "coding_cores": row.coding_cores or search.question.coding_cores,
        "coding_cores_hiding": None if needed is None else needed.hiding,
        "codec": row.codec.name,
        "rank": row.rank,
        **{key: value for key, value in vars(row.prediction).items() if key != "bytes_by_cluster"},
        "bytes_of_all_clusters": sum(row.prediction.bytes_by_cluster),
        "bytes_per_day": row.bytes_per_day,
        "outer_memory": {**vars(row.memory), "contributions": row.contributions},
        "outer_bytes_on_device": row.on_device,
        "outer_bytes_on_host": row.on_host,
        "is_fitting": row.is_fitting,
        "min_gbps": None if least is None else least / 1e9,
        "harm": harm(row),
        "expected_loss": None if expected is None else vars(expected),
        "bill": vars(bill_of(row, search.question, budget)) if budget.is_asked else None,
        "dsx": block,
        "flags": flags_of(block),
    }


def _meets(row: Candidate, question: Question) -> bool:
    return row.is_fitting and row.prediction.utilization >= question.target


def _delay(row: Candidate) -> str:
    late = row.method.delay.rounds_under_way
    if late:
        return "round" if late == 1 else f"{late} r."
    return str(row.overlap_steps)


def _codec(row: Candidate) -> str:
    return row.codec.name if row.rank is None else f"rank {row.rank}"


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, soft_wrap=True, markup=False)
