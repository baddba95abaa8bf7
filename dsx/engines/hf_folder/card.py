"""README.md of an exported folder: a model card with the run's facts, as its records have them.

Facts are of the run that saved the checkpoint and of steps up to it. Where its folder is not at
hand, or holds another run, the card says what the checkpoint itself does. It names no hosts, paths
or addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dsx
from dsx.checkpoint.averaged_model import SavedModel
from dsx.core.units import format_bytes
from dsx.telemetry.report import ClusterReport, summarize_cluster
from dsx.telemetry.run_folder import ClusterRun, Run, find_run, names_of_starts, open_run

CARD = "README.md"
_FRONT = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- dsx\n---\n"


@dataclass(frozen=True)
class RunFacts:
    """What run.json says of the start that saved a checkpoint, and its clusters' totals by then."""

    begun: str
    start: Mapping[str, Any]
    saved: str | None
    clusters: list[ClusterReport]


def facts_of(model: SavedModel, given: Path) -> tuple[RunFacts | None, str]:
    """Return the facts of the run that saved a model, or None and why there are none.

    `given` is the path on the command line: the run's folder, or a checkpoint in or outside of it.
    """
    why = "no run's folder"
    for path in (given, model.directory):
        try:
            run = open_run(find_run(path))
        except (FileNotFoundError, ValueError) as error:
            why = str(error)
            continue
        parts = [p for p in run.clusters if p.about and model.session in names_of_starts(p.about)]
        if parts:
            return _read(run, parts, model), ""
        why = f"{run.directory} holds another run's"
    return None, why


def card(
    name: str, model: SavedModel, dtype: str, facts: RunFacts | None, made_by: str | None
) -> str:
    """Return the text of a model card; `made_by` is what transformers builds of the folder."""
    rows = [("model", made_by), ("trained parameters", f"{model.numel:,}"), ("weights in", dtype)]
    what = "their mean" if model.is_mean else "the anchor, which they share"
    rows += [("clusters", f"{model.num_saved_clusters}; the weights are {what}")]
    rows += [("inner steps", f"{model.step:,}"), ("checkpoint", model.directory.name)]
    rows += _rows(facts, model) if facts else []
    rows.append(("exported with", f"dsx {dsx.__version__}"))
    table = "\n".join(f"| {key} | {value} |" for key, value in rows if value)
    records = "" if facts else "\nThe records of the run were not at hand when this was written.\n"
    return (
        f"{_FRONT}\n# {name}\n\nThe average of a run that was trained with dsx on "
        f"{model.num_saved_clusters} clusters.\n\n```python\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("{name}")\n```\n\n'
        f"## The run\n\n| | |\n| --- | --- |\n{table}\n{records}"
    )


def _read(run: Run, parts: Iterable[ClusterRun], model: SavedModel) -> RunFacts:
    told = sorted(parts, key=lambda part: part.cluster)
    starts = told[0].about["starts"]
    own = [start for start in starts if start.get("session") == model.session]
    saved = [
        entry["time"]
        for part in told
        for entry in part.about["checkpoints"]
        if (entry["tag"], entry["step"]) == (model.directory.name, model.step)
    ]
    until = [part for part in (_until(part, model.step) for part in told) if part.steps]
    return RunFacts(
        starts[0]["time"],
        (own or starts)[-1],
        max(saved, default=None),
        [summarize_cluster(part) for part in until],
    )


def _until(part: ClusterRun, step: int) -> ClusterRun:
    """Return the records of steps up to one."""
    end = part.finish if part.finish and part.finish.get("step", 0) <= step else None
    return replace(part, steps=[r for r in part.steps if r["step"] <= step], finish=end)


def _rows(facts: RunFacts, model: SavedModel) -> list[tuple[str, str | None]]:
    """Return what only the run's records say."""
    start, clusters = facts.start, facts.clusters
    losses = [f"cluster {c.cluster}: {c.last_loss:.4f}" for c in clusters if c.last_loss]
    tokens = sum(c.tokens for c in clusters)
    everyone = "" if len(clusters) == model.num_saved_clusters else f", of {len(clusters)} clusters"
    sent = [f"cluster {c.cluster}: {format_bytes(c.bytes_sent)}" for c in clusters]
    versions = [f"{name} {version}" for name, version in start.get("versions", {}).items()]
    until = f", saved {facts.saved}" if facts.saved else ""
    return [
        ("preset", start["config"]["resolved"]["preset"]),
        ("ranks of a cluster", f"{start['ranks']}"),
        ("tokens", f"{tokens:,}{everyone}" if tokens else None),
        ("training loss, mean of the last ten steps", "; ".join(losses) or None),
        ("sent to the other clusters", "; ".join(sent) or None),
        ("begun", f"{facts.begun}{until}"),
        ("versions", ", ".join(versions) or None),
    ]
