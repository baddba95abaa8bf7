"""What `dsx doctor` prints, in its order: the machine, the block, what it takes, what it does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from dsx.config.files import ConfigError, read_json, shorten
from dsx.config.planned import planned_for
from dsx.config.schema import DsxConfig
from dsx.data.manifest import BuildSummary
from dsx.plan.candidates import Question
from dsx.plan.model_files import ModelFiles, read_model
from dsx.plan.question import Given as PlanGiven
from dsx.plan.question import read_question
from dsx.support.doctor.block import read_block
from dsx.support.doctor.data import look_at_data, read_data
from dsx.support.doctor.finding import Finding, is_stopped
from dsx.support.doctor.machine import (
    free_host_bytes,
    gpu_gib,
    look_at_machine,
    missing_of,
    num_gpus,
)
from dsx.support.doctor.meeting import look_at_meeting
from dsx.support.doctor.method import look_at_launch, picture
from dsx.support.doctor.planned import (
    Planned,
    look_at_disk,
    look_at_host_memory,
    look_at_line,
    look_at_memory,
    look_at_state_folder,
    plan,
)

_WIDEST = 120


@dataclass(frozen=True)
class Given:
    """The command line, as typed."""

    config: Path | None
    model: Path | None
    ranks: int | None
    limit: float | None
    checkpoints: Path
    link: Path | None
    step_seconds: float | None
    data: tuple[Path, ...] = ()


def look(given: Given, say: Callable[[str], object]) -> bool:
    """Print what is found, line by line; return whether nothing would stop a run.

    ValueError, before anything is printed, for what is missing or does not go together.
    """
    given, unseen = _with_plan(given)
    _require_sense(given)
    if given.config is None:
        return _tell(look_at_machine(), [], say)
    config, findings = read_block(given.config)
    files = _files(given)
    question = None if config is None else _question(given, config)
    data = [] if config is None else _data(given, config)
    found = [*look_at_machine(), *findings]
    if config is None:
        return _tell(found, [], say)
    planned, refused = _planned(config, files)
    found += [*unseen, *refused, *missing_of(config)]
    found += look_at_meeting(config.clusters, config.link)
    found += look_at_disk(config, given.checkpoints, planned)
    found.append(look_at_memory(planned, given.limit, gpu_gib()))
    if planned is not None:
        ranks_here = _ranks_here(config, planned)
        found.append(look_at_host_memory(planned, ranks_here, free_host_bytes()))
        found += look_at_state_folder(config, planned, ranks_here)
    found += look_at_data(config, data)
    drawn: list[str] = []
    try:
        drawn = picture(config, planned)
    except ValueError as error:
        found.append(Finding("STOP", "rounds", str(error)))
    if planned is not None and question is not None:
        found.append(look_at_line(config, planned, question))
    elif question is None:
        text = "what the line hides is told with --link FILE of dsx net-test, and --step-seconds"
        found.append(Finding("note", "line", text))
    found.append(look_at_launch(config, given.config))
    return _tell(found, drawn, say)


def _tell(found: list[Finding], drawn: list[str], say: Callable[[str], object]) -> bool:
    width = min(shutil.get_terminal_size().columns, _WIDEST)
    for finding in found:
        for line in finding.lines(width):
            say(line)
    for line in drawn:
        say(line)
    stops = sum(finding.mark == "STOP" for finding in found)
    if stops:
        say(f"{stops} of these would stop a run: mend what stands behind STOP")
    return not is_stopped(found)


def _data(given: Given, config: DsxConfig) -> list[BuildSummary]:
    """Return the datasets that are given; ValueError for one that is none."""
    return read_data(given.data, config.clusters.num_clusters) if given.data else []


def _ranks_here(config: DsxConfig, planned: Planned) -> int:
    """Return how many ranks this host will have: one per GPU, or those that there are at most."""
    clusters = config.clusters.num_clusters if config.clusters.rendezvous == "env://" else 1
    ranks = clusters * planned.files.cluster.ranks
    return min(ranks, num_gpus() or ranks)


def _with_plan(given: Given) -> tuple[Given, list[Finding]]:
    """Return it with what a JSON is planned for in the place of what is not given, if it is all.

    And what is to be said of a model's file that is not there.
    """
    if given.config is None or given.config.suffix != ".json":
        return given, []
    try:
        planned = planned_for(read_json(given.config), given.config)
    except ConfigError:  # said with the block
        return given, []
    model, ranks = given.model or planned.model_file(), given.ranks or planned.ranks_per_cluster
    if model is None and planned.model is not None:
        text = f"dsx.plan.model: there is no file {shorten(planned.model)} on this host; a run has "
        return given, [Finding("note", "model", text + "no need of it, what follows has")]
    if model is None or ranks is None:
        return given, []
    return replace(given, model=model, ranks=ranks), []


def _require_sense(given: Given) -> None:
    """Raise ValueError for an option that would be ignored, or needs another."""
    needs_config = {
        "--model": given.model, "--ranks": given.ranks, "--limit": given.limit,
        "--link": given.link, "--step-seconds": given.step_seconds, "--data": given.data or None,
    }  # fmt: skip
    named = [name for name, value in needs_config.items() if value is not None]
    if given.config is None and named:
        raise ValueError(
            f"{named[0]} goes with CONFIG, and would be ignored: give a DeepSpeed JSON"
        )
    if (given.link is None) != (given.step_seconds is None):
        raise ValueError("--link FILE and --step-seconds T belong together: give both, or neither")
    is_json = given.config is not None and given.config.suffix == ".json"
    if is_json and (given.model is None) != (given.ranks is None):
        raise ValueError("--model FILE and --ranks N belong together: give both, or neither")
    if is_json and given.model is None and (given.link is not None or given.limit is not None):
        option = "--link" if given.link is not None else "--limit"
        raise ValueError(f"{option} needs the model: add --model FILE and --ranks N")


def _files(given: Given) -> ModelFiles | None:
    assert given.config is not None
    if given.config.suffix == ".json" and given.model is None:
        return None
    return read_model(given.config, given.model, given.ranks)


def _planned(config: DsxConfig, files: ModelFiles | None) -> tuple[Planned | None, list[Finding]]:
    """Return the model as a run would cut it, or why that cannot be."""
    if files is None:
        return None, []
    try:
        return plan(config, files), []
    except ValueError as error:
        return None, [Finding("STOP", "model", str(error))]


def _question(given: Given, config: DsxConfig) -> Question | None:
    """Return the line and the step as dsx plan reads them, None if no line is given."""
    if given.link is None or given.config is None:
        return None
    is_json = given.config.suffix == ".json"
    asked = PlanGiven(
        megatron=None if is_json else given.config,
        deepspeed=given.config if is_json else None,
        model=given.model,
        gpus_per_cluster=given.ranks,
        step_seconds=given.step_seconds,
        link=given.link,
        clusters=config.clusters.num_clusters,
        coding_cores=config.coding.cores,
    )
    return read_question(asked).question
