"""What is said of a run: what was set, what happened, what cost time, what to change.

Each sentence has a number of the run's in it. Advice is given where a number is beyond a bound that
is written beside it, and there is none where nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.core.units import format_bytes
from dsx.telemetry.html_report.numbers import ClusterTime, RunNumbers, is_finite
from dsx.telemetry.in_words import said_of_heal, said_of_memory, said_of_setup, sentence
from dsx.telemetry.measured_rates import say_rate

_GOOD_UTILIZATION = 0.95
_GOOD_HIDDEN = 0.75  # of a method with a delay
_MUCH = 0.02  # of the steps' time, waited for transfers
_HALF = 0.5  # of what the line was measured to
_SLOWER = 0.85  # of the fastest cluster's tokens per second
_OF_ONE = ("healed", "not_saved", "not_copied")  # what concerns one cluster, which alone records it
_FEW_TIMES = 10  # less than data parallel: fewer are few
_MOST_ROUND_TRIPS = 6


def duration(seconds: float) -> str:
    """Return seconds as people read them."""
    if seconds < 1:
        return f"{1000 * seconds:.2g} ms" if seconds < 0.01 else f"{1000 * seconds:.0f} ms"
    if seconds < 90:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:.3g} h"


def what_was_set(numbers: RunNumbers) -> list[str]:
    """Say which method ran, over what."""
    return said_of_setup(numbers.state, numbers.settings)


def what_is_missing(numbers: RunNumbers) -> list[str]:
    """Say what of the run could not be read, and is in no number below; nothing where all was."""
    said: list[str] = []
    if numbers.state["trouble"]:
        said.append(sentence(f"not all could be read: {numbers.state['trouble']}"))
    others = ", ".join(map(str, numbers.state["other_runs"]))
    if others:
        said.append(f"Left out: cluster {others}, whose records are of another run.")
    return said


def what_happened(numbers: RunNumbers) -> list[str]:
    """Say how far it came, how it ended, and what came between."""
    state = numbers.state
    planned = f" of {state['planned_steps']:,}" if "planned_steps" in state else ""
    whole = duration(max(one.whole for one in numbers.clusters))
    said = [f"{state['step']:,}{planned} inner steps in {whole}."]
    if "begun" in state:
        again = f", started {state['num_starts']} times" if state["num_starts"] > 1 else ""
        said[0] = f"{said[0][:-1]}, begun {state['begun']}{again}."
    if "tokens" in state:
        speed = sum(one.tokens_per_second or 0 for one in numbers.clusters)
        said.append(f"{state['tokens']:,.0f} tokens by all clusters, {speed:,.0f} a second.")
    losses = [f"{c.last_loss:.4g} (cluster {c.cluster})" for c in numbers.clusters
              if c.last_loss is not None]  # fmt: skip
    if losses:
        said.append(f"The mean of the last ten losses is {', '.join(losses)}.")
    average = numbers.summary.get("val_loss_average")
    if average is not None:
        own = ", ".join(f"{v:.4f}" for v in numbers.summary.get("val_loss_clusters") or () if v)
        said.append(f"On data that is not trained on, the average of the clusters has {average:.4f}"
                    + (f", and they themselves {own}." if own else "."))  # fmt: skip
    ends = {f"cluster {row['cluster']}: {_end_of(row)}" for row in state["members"]}
    said.append(sentence(f"ends: {'; '.join(sorted(ends))}"))
    said += _what_went_wrong(numbers)
    if memory := said_of_memory(numbers.memory):
        said.append(sentence(memory))
    checkpoints = state["checkpoints"]
    if checkpoints:
        common = checkpoints.get("common_step")
        said.append(f"Checkpoints: {checkpoints['count']}; "
                    + (f"all clusters have that of step {common:,}." if common is not None
                       else "none is of all clusters."))  # fmt: skip
    return said


def what_cost_time(numbers: RunNumbers) -> list[str]:
    """Say where the slowest cluster's time went, and what was sent."""
    one = numbers.slowest
    said = [f"Cluster {one.cluster}, whose steps took longest, spent {duration(one.whole)}:"]
    for name, seconds in parts_of(one):
        said.append(f"{_percent(seconds / one.whole)} ({duration(seconds)}) {name}.")
    traffic = numbers.state["traffic"]
    if traffic.get("sent"):
        text = f"A cluster sent {format_bytes(traffic['sent'])}"
        parallel = traffic.get("data_parallel")
        if parallel:
            times = f"{parallel / traffic['sent']:.3g} times as much"
            text += (
                "; data parallel training, all gradients in fp32 at every step, would have sent "
            )
            text += f"{format_bytes(parallel)}, {times}"
        said.append(text + ".")
    if "hidden" in traffic:
        said.append(f"Of the last 50 transfers' time {_percent(traffic['hidden'])} was hidden "
                    "behind training.")  # fmt: skip
    if "line" in traffic:
        rate = say_rate(traffic["line"], traffic.get("measured"))
        said.append(f"While the last 50 transfers were under way the line carried {rate}.")
    said += _round_trips(numbers.state)
    said.append("Saving is not recorded apart: it is in the time of the step that follows.")
    return said


def _round_trips(state: dict[str, Any]) -> list[str]:
    """Say how long messages took on each link; of many links on those that took longest."""
    told = sorted(
        (link for link in state["links"] if "least_seconds" in link),
        key=lambda link: -link["round_trip_seconds"],
    )
    few = told[:_MOST_ROUND_TRIPS]
    said = [
        f"Round trip from cluster {link['of']} to {link['to']}: {duration(link['least_seconds'])} "
        f"at least, the last time {duration(link['round_trip_seconds'])}{_late_rate(link)}."
        for link in few
    ]
    if few and len(few) < state["num_links"]:
        said.append(f"Those were the longest of {state['num_links']:,} links.")
    return said


def _late_rate(link: dict[str, Any]) -> str:
    """Say what went out in the last minute, where it is known what the link was measured to."""
    rate, measured = link.get("sent_bytes_per_second"), link.get("measured_bytes_per_second")
    if rate is None or measured is None:
        return ""
    return f"; in the last minute {say_rate(rate, measured)} went out"


def what_to_change(numbers: RunNumbers) -> list[str]:
    """Advise where a number is beyond its bound."""
    said: list[str] = []
    one, state = numbers.slowest, numbers.state
    taken = one.trained + one.waited + one.held_up
    hidden = state["traffic"].get("hidden")
    delay = (numbers.settings.get("delay") or {}).get("steps")
    if numbers.utilization is not None and numbers.utilization < _GOOD_UTILIZATION and taken:
        share = one.waited / taken
        said.append(
            f"Utilization is {_percent(numbers.utilization)}, below {_percent(_GOOD_UTILIZATION)}: "
            + (f"{_percent(share)} of the steps' time was waiting for the line. A larger "
               "schedule.interval, fewer bits (compression), or a delay; dsx plan says which."
               if one.waited > one.held_up else
               f"{_percent(one.held_up / taken)} of the steps' time went to copies and outer "
               "steps. A larger schedule.interval makes them rarer.")
        )  # fmt: skip
    if hidden is not None and hidden < _GOOD_HIDDEN and delay and one.waited > _MUCH * taken:
        said.append(f"Only {_percent(hidden)} of the last transfers' time was hidden, and less "
                    f"than {_percent(_GOOD_HIDDEN)} means that the line is slower than the delay "
                    "was chosen for: more delay.steps, a larger H, or fewer bits.")  # fmt: skip
    line, measured = state["traffic"].get("line"), state["traffic"].get("measured")
    if measured and line is not None and line < _HALF * measured and one.waited > _MUCH * taken:
        said.append(f"While transfers are under way the line carries {say_rate(line, measured)}, "
                    "less than half, and training waits for it: measure it again (dsx net-test), "
                    "and see in dsx trace what else takes a transfer's time.")  # fmt: skip
    speeds = {c.cluster: c.tokens_per_second for c in numbers.clusters if c.tokens_per_second}
    if speeds and min(speeds.values()) < _SLOWER * max(speeds.values()):
        slow = min(speeds, key=lambda m: speeds[m] or 0.0)
        said.append(f"Cluster {slow} trains {speeds[slow]:,.0f} tokens a second and the fastest "
                    f"{max(speeds.values()):,.0f}: the others wait for it at each round. Look at "
                    "its host, or give it a smaller batch.")  # fmt: skip
    traffic = state["traffic"]
    if traffic.get("data_parallel") and traffic["data_parallel"] < _FEW_TIMES * traffic["sent"]:
        ratio = traffic["data_parallel"] / traffic["sent"]
        said.append(f"It sent {ratio:.2g} times less than data parallel training would, and less "
                    f"than {_FEW_TIMES} times is little: a larger H, or fewer bits.")  # fmt: skip
    for kind, count in numbers.alarms.items():
        said.append(f"The guard has warned of {kind!r} {count} times: its sentence in the log says "
                    "what to change (docs/methods/guard.md).")  # fmt: skip
    for m, held in numbers.memory.items():
        planned, outer = held.get("outer_planned_bytes"), held.get("outer_bytes")
        if planned is not None and outer is not None and outer > planned:
            said.append(f"Cluster {m}'s outer state takes {format_bytes(outer)}, more than the "
                        f"{format_bytes(planned)} of its plan: please report that.")  # fmt: skip
    if numbers.left_out["differed_in"] or numbers.left_out["uncommitted_by"]:
        said.append("Clusters held or computed different bits: test the memory and the network "
                    "card of the cluster that the log names.")  # fmt: skip
    if state["step"] and state["checkpoints"] and "common_step" not in state["checkpoints"]:
        said.append("No checkpoint is of all clusters: the run cannot go on from one.")
    return said or ["Nothing stands out."]


def parts_of(one: ClusterTime) -> list[tuple[str, float]]:
    """Return what took a cluster's time, and seconds; what took none is left out."""
    parts = [
        ("training", one.trained), ("waiting for transfers", one.waited),
        ("held up by dsx otherwise: copies, outer steps", one.held_up),
        ("between steps, as where it was stopped, lost or started again", one.stood),
    ]  # fmt: skip
    return [(name, seconds) for name, seconds in parts if seconds > 0.0005 * one.whole]


def _what_went_wrong(numbers: RunNumbers) -> list[str]:
    said: list[str] = []
    words = {
        "refused_by": "refused, as values were not finite or far too large",
        "differed_in": "left out, as clusters held different bits",
        "uncommitted_by": "left out, as clusters came to different means",
        "idle_in": "idle in a cluster, which took no step",
    }
    said += [f"{count} rounds were {words[name]}." for name, count in numbers.left_out.items()
             if count]  # fmt: skip
    for cluster in numbers.run.clusters:
        for record in cluster.members:
            named = ", ".join(map(str, record["members"]))
            said.append(f"From step {record['step']:,} on, clusters {named} trained.")
        for record in cluster.events:
            if record.get("kind") == "rollback":
                said.append(f"Training went back from step {record['from_step']:,} to "
                            f"{record['step']:,}: {record['why']}.")  # fmt: skip
        if cluster.members or any(r["kind"] not in _OF_ONE for r in cluster.events):
            break
    for cluster in numbers.run.clusters:
        heals = [record for record in cluster.events if record["kind"] == "healed"]
        said += [f"Cluster {cluster.cluster} {said_of_heal(record)}." for record in heals]
        for kind, what in (("not_saved", "save at"), ("not_copied", "copy the checkpoints of")):
            lost = [record["step"] for record in cluster.events if record["kind"] == kind]
            if lost:
                said.append(f"Cluster {cluster.cluster} could not {what} step(s) "
                            f"{', '.join(f'{step:,}' for step in lost)}: see its log.")  # fmt: skip
    skipped = {row["cluster"]: row.get("skipped_steps") for row in numbers.state["members"]}
    said += [
        f"Cluster {m}'s optimizer skipped {count} steps." for m, count in skipped.items() if count
    ]
    bad = [c.cluster for c in numbers.clusters if c.last_loss is not None
           and not is_finite(c.last_loss)]  # fmt: skip
    said += [f"The last losses of cluster {m} are no numbers." for m in bad]
    return said


def _end_of(row: Mapping[str, Any]) -> str:
    """Return how a cluster is; whether it goes on now is nothing that its records say."""
    goes_on = row["state"] in ("trains", "silent")
    return "no end recorded" if goes_on else row["state"] + _why(row)


def _why(row: Mapping[str, Any]) -> str:
    return f" ({row['why']})" if row.get("why") else ""


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
