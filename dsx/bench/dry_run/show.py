"""What `dsx dry-run` prints: a table by stage, then what is the same for all, in words."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from dsx.bench.dry_run.dry_run import DryRun
from dsx.core.units import format_bytes, format_seconds
from dsx.plan.memory.show import lent_in_words


def show(run: DryRun, console: Console) -> None:
    """Print it."""
    cluster, config, record = run.files.cluster, run.config, run.record()
    is_mixture = run.files.model.experts is not None
    active = f", {run.active_parameters / 1e9:.4g} B active" if is_mixture else ""
    is_small = run.parameters < 10**8 and not is_mixture
    count, unit = (run.parameters / 1e6, "M") if is_small else (run.parameters / 1e9, "B")
    _say(
        console,
        f"{count:.4g} {unit} parameters{active}; {run.num_clusters} clusters of "
        f"{cluster.ranks} ranks ({cluster}); {config.preset}, outer state {config.state.where}",
    )
    named = f": pipeline stages {', '.join(map(str, run.built))}" if len(run.stages) > 1 else ""
    like = "" if len(run.built) == len(run.stages) else "; the others are like one of them"
    _say(console, f"built with {cluster.engine}'s own objects{named}{like}")
    console.print(_table(run))
    if record["lent_bytes_per_rank"]:
        _say(console, lent_in_words(record["lent_bytes_per_rank"]))
    if run.sends_all_once:
        sent = format_bytes(record["bytes_per_round_per_cluster"])
        _say(console, f"a cluster's line: {sent} per round")
    _say(
        console,
        f"largest to mean bytes of a stage's ranks, in all clusters: {record['owner_spread']:.3f}",
    )
    _say(
        console,
        f"a start, from dsx.init_distributed on: {record['start_seconds']:.1f} s from equal "
        f"weights, {run.hash_seconds:.1f} s of them their digests, on cores as measured: "
        f"{run.start_model.host}",
    )
    rates = run.rates
    if record["clusters"] > 1:
        unequal = format_seconds(record["start_seconds_unequal"])
        _say(console, f"  from other weights at {rates.gbps:g} Gbit/s: {unequal}")
    _say(
        console,
        "a save: a file of outer state from each rank, the largest "
        f"{format_bytes(record['save_bytes_per_rank'])}, and what is under way then; at "
        f"{rates.disk_mb_s:g} MB/s {format_seconds(record['save_seconds'])}",
    )
    _say(
        console,
        f"utilization {100 * record['utilization']:.1f} %, at {format_seconds(rates.step_seconds)} "
        f"per inner step, {rates.gbps:g} Gbit/s and {rates.latency_ms:g} ms one way",
    )
    if rates.assumed:
        _say(console, f"assumed: {'; '.join(words for _, words in rates.assumed.values())}")
    for line in _unsaid(run):
        _say(console, f"not said: {line}")


def _table(run: DryRun) -> Table:
    table = Table(title="of the largest rank of a stage", title_justify="left")
    table.add_column("")
    built = [run.stages[index] for index in run.built]
    for stage in built:
        table.add_column(f"stage {stage.stage.index}", justify="right")

    def row(name: str, values: list[str]) -> None:
        table.add_row(name, *values)

    largest = [stage.ranks[stage.largest] for stage in built]
    row("weights", [f"{rank.built.numel:,}" for rank in largest])
    masters = [sum(f.numel for f in rank.built.fragments) for rank in largest]
    row("masters synchronised", [f"{numel:,}" for numel in masters])
    row("lanes of the stage", [str(stage.lanes) for stage in built])
    row("fragments", [f"{len(rank.used)} of {len(rank.wire)}" for rank in largest])
    sent = [max(rank.most_sent for rank in stage.ranks) for stage in built]
    if run.sends_all_once:
        row("sent per round", [format_bytes(size) for size in sent])
    if run.goes_over_gloo:
        clusters, streams = run.num_clusters, run.config.link.streams
        counts = [max(r.connections(clusters, streams) for r in s.ranks) for s in built]
        row("connections to peers", [str(count) for count in counts])
        row("threads of transfers", [str(max(r.threads for r in s.ranks)) for s in built])
    table.add_section()
    for name in vars(built[0].memory):
        sizes = [getattr(stage.memory, name) for stage in built]
        if any(sizes):
            row(name.replace("_", " "), [format_bytes(size) for size in sizes])
    table.add_section()
    row("outer training, host", [format_bytes(stage.on_host) for stage in built])
    if run.config.state.device == "disk":
        row("outer training, disk", [format_bytes(stage.on_disk) for stage in built])
    row("outer training, device", [format_bytes(stage.on_device) for stage in built])
    return table


def _unsaid(run: DryRun) -> list[str]:
    found: list[str] = []
    if not run.sends_all_once:
        kind = run.config.axes["schedule"]["type"]
        found.append(f"bytes per round: with schedule.type={kind!r} the run decides what is sent")
    if not run.goes_over_gloo:
        found.append("connections and threads: over links they are shared by a host's ranks")
    return found


def _say(console: Console, text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)
