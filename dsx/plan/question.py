"""What `dsx plan` is given, read into a question: from files, numbers, or a run's records.

Every reading leaves a line that says what was taken and from where, which the plan prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dsx.compress.quantized import Quantized
from dsx.config.files import read_any_json
from dsx.config.schema import preset
from dsx.plan.budget import Budget
from dsx.plan.candidates import Question
from dsx.plan.coding import slowdown_of, slowed
from dsx.plan.coding_cores import beside_training
from dsx.plan.from_run import RunFigures, read_run
from dsx.plan.given import BOUNDS, Given, require_sense
from dsx.plan.launch_cost import launch_cost, read_launch_figures
from dsx.plan.link import Costs, Link, read_codec_figures
from dsx.plan.model import (
    PlannedModel,
    from_files,
    from_numels,
    from_parameters,
    from_sizes,
)
from dsx.plan.model_files import read_model
from dsx.plan.step_time import PEAK_FLOPS, USUAL_MFU, require_gpu, seconds_of_step

_GIB = 2**30


@dataclass(frozen=True)
class Read:
    """A question, and what was read for it."""

    question: Question
    facts: list[str] = field(default_factory=list[str])
    budget: Budget = Budget()


def read_question(given: Given) -> Read:
    """Read everything; ValueError with what is missing, or given twice."""
    require_sense(given)
    facts: list[str] = []
    run = None if given.from_run is None else _run(given, facts)
    model = _model(given, run, facts)
    step_seconds = _step_seconds(given, model, run, facts)
    clusters = _clusters(given, run)
    link = _link(given, run, facts)
    limit = None if given.memory_limit is None else round(given.memory_limit * _GIB)
    if limit is not None and model.inner_bytes is None:
        facts.append(
            "memory: --memory-limit is compared with outer training alone; what the inner engine "
            "takes is known with --megatron or --deepspeed"
        )
    question = Question(
        model,
        step_seconds,
        link,
        clusters,
        given.target / 100,
        _costs(given, run, facts),
        given.max_interval,
        limit,
        _count(given.link, "streams") or 1,
        given.coding_cores,
        None if given.cores_per_rank is None else beside_training(given.cores_per_rank),
    )
    budget = Budget(
        given.egress_price, given.gpu_hour_price, given.steps, given.mtbf, given.heal_seconds,
        given.save_every, given.save_seconds,
    )  # fmt: skip
    return Read(question, facts, budget)


def _clusters(given: Given, run: RunFigures | None) -> int:
    measured = _count(given.link, "clusters")
    if given.clusters is not None:
        if measured not in (None, given.clusters):
            raise ValueError(
                f"--clusters {given.clusters}, but {given.link} was measured between {measured}: "
                "leave --clusters out, or measure the line of all clusters"
            )
        return given.clusters
    if measured is not None:
        return measured
    if run is None:
        raise ValueError("--clusters is missing: the number of clusters that are to train together")
    return run.num_clusters


def _run(given: Given, facts: list[str]) -> RunFigures:
    assert given.from_run is not None
    run = read_run(given.from_run)
    facts.append(
        f"{given.from_run}: {run.preset}, {run.num_clusters} clusters of {run.ranks} ranks, "
        f"{run.num_steps} steps without a sync, {run.num_syncs} syncs"
    )
    return run


def _model(given: Given, run: RunFigures | None, facts: list[str]) -> PlannedModel:
    sources: dict[str, object] = {
        "--megatron": given.megatron,
        "--deepspeed": given.deepspeed,
        "--params": given.params,
    }
    if all(value is None for value in sources.values()):
        sources["--from-run"] = run
    named = [name for name, value in sources.items() if value is not None]
    if len(named) != 1:
        raise ValueError(
            f"the model is given by {' and '.join(named) or 'nothing'}: give one of --megatron "
            "FILE, --deepspeed FILE with --model FILE, --params N with --layers N, --from-run DIR"
        )
    ranks = given.gpus_per_cluster
    if ranks is None and run is not None:
        ranks = run.ranks
    if named == ["--from-run"]:
        assert run is not None and ranks is not None
        if run.parameters:
            return from_parameters(run.parameters, ranks)
        facts.append(
            "model: of a pipeline's stages the records tell only the sizes of fragments, which are "
            "taken for layers; low rank is left out"
        )
        return from_numels(run.fragment_numels, ranks)
    if given.params is not None:
        if given.layers is None or ranks is None:
            raise ValueError("--params needs --layers N and --gpus-per-cluster N")
        if given.hidden is None:
            facts.append("model: without --hidden low rank is left out, which needs matrices")
        return from_sizes(given.params, given.layers, given.hidden, ranks)
    source = given.megatron or given.deepspeed
    assert source is not None
    files = read_model(source, given.model, given.gpus_per_cluster)
    if files.cluster.untold is not None:
        facts.append(f"model: {files.cluster.untold}")
    return from_files(files)


def _step_seconds(
    given: Given, model: PlannedModel, run: RunFigures | None, facts: list[str]
) -> float:
    options = (("--step-seconds", given.step_seconds), ("--gpu", given.gpu))
    named = [name for name, value in options if value is not None]
    if len(named) == 2 or not (named or run):
        raise ValueError(
            "a step's seconds are given by "
            f"{' and '.join(named) or 'nothing'}: give --step-seconds T as measured, or --gpu "
            f"{'|'.join(PEAK_FLOPS)} to estimate them"
        )
    if given.step_seconds is not None:
        return given.step_seconds
    if given.gpu is None:
        assert run is not None
        facts.append(
            f"step: {run.step_seconds:.4g} s, the median without launches, waits and outer steps"
        )
        return run.step_seconds
    return _estimated(given, model, facts)


def _estimated(given: Given, model: PlannedModel, facts: list[str]) -> float:
    """Return 6 N tokens over what the accelerators do."""
    assert given.gpu is not None
    peak, active = require_gpu(given.gpu), model.active_numel
    mfu = USUAL_MFU if given.mfu is None else given.mfu
    tokens = given.tokens_per_step
    if tokens is None and model.files is not None and model.files.batch.sequences_per_step:
        tokens = model.files.batch.sequences_per_step * model.files.batch.sequence
    if tokens is None:
        raise ValueError("--gpu needs --tokens-per-step N, the tokens of one cluster's inner step")
    seconds = seconds_of_step(active, tokens, model.ranks, given.gpu, mfu)
    least, most = BOUNDS["step_seconds"]
    if not least <= seconds <= most:
        raise ValueError(
            f"--gpu {given.gpu} makes {seconds:.4g} s of a step of {tokens:g} tokens, which must "
            f"be {least:g} to {most:g}; check --tokens-per-step and --gpus-per-cluster"
        )
    facts.append(
        f"step: {seconds:.4g} s, estimated: 6 x {active:.4g} parameters x {tokens:.4g} tokens / ("
        f"{model.ranks} x {peak / 1e12:g} TFLOP/s x {100 * mfu:g} %)"
    )
    return seconds


def _link(given: Given, run: RunFigures | None, facts: list[str]) -> Link:
    latency = None if given.latency_ms is None else given.latency_ms / 1000
    if given.gbps is not None:
        link = Link(given.gbps * 1e9, latency or 0.0)
        facts.append(
            f"line: {given.gbps:g} Gbit/s of frames, {100 * link.payload_share:.1f} % of it "
            f"payload; {1000 * link.latency_seconds:g} ms one way"
        )
        return link
    if given.link is not None:
        record = read_any_json(given.link)
        rate = _number(record, "bits_per_second", given.link)
        own = _number(record, "latency_seconds", given.link)
        link = Link(rate, own if latency is None else latency, payload_share=1)
        facts.append(
            f"line: {rate / 1e9:.4g} Gbit/s of payload, {1000 * link.latency_seconds:.3g} ms one "
            f"way, measured ({given.link})"
        )
        return link
    if run is None or run.payload_bits_per_second is None:
        raise ValueError("the line is missing: give --gbps G, or --link FILE of dsx net-test")
    facts.append(
        f"line: at least {run.payload_bits_per_second / 1e9:.4g} Gbit/s of payload: the fastest of "
        "its transfers, in whose time latency and waits for others' coding are, too"
    )
    if latency is None:
        facts.append("latency: 0, as no record tells it apart; --latency-ms adds it")
    return Link(run.payload_bits_per_second, latency or 0.0, payload_share=1)


def _costs(given: Given, run: RunFigures | None, facts: list[str]) -> Costs:
    costs = Costs() if given.codec is None else read_codec_figures(read_any_json(given.codec))
    if given.codec is None:
        facts.append("codecs: one core per rank at the documented speeds; --codec measures")
    blocking, is_of_run, told = _blocking(given, run)
    costs = replace(costs, blocking_seconds_per_element=blocking, is_of_run=is_of_run)
    took = f"{1e9 * blocking:.3g} ns per element of a rank at launch and apply"
    facts.append(f"training thread: {took}, {told}")
    cores, of_whom = given.coding_cores, ""
    if given.cores_per_rank is not None:
        cores = beside_training(given.cores_per_rank)
        of_whom = f", those of {given.cores_per_rank} that training leaves"
    elif cores is None and run is not None:
        cores, of_whom = run.coding_cores, ", as the run's"
    if cores is not None:
        costs = replace(costs, cores=cores)
        facts.append(f"coding: on at most {cores} of a rank's cores at a time{of_whom}")
    if run is None or run.coding_seconds_per_element is None:
        return costs
    return _with_coding(costs, run, given.codec, facts)


def _blocking(given: Given, run: RunFigures | None) -> tuple[float, bool, str]:
    """Return the training thread's seconds per element, whether a run's, and from where."""
    if given.launch is not None:
        seconds = read_launch_figures(read_any_json(given.launch))
        return seconds, False, f"measured ({given.launch})"
    if run is not None and run.blocking_seconds_per_element is not None:
        return run.blocking_seconds_per_element, True, "as the run's"
    return launch_cost().seconds_per_element, False, "on one thread; --launch measures"


def _with_coding(costs: Costs, run: RunFigures, codec: Path | None, facts: list[str]) -> Costs:
    """Return costs at which a transfer's coding takes what the run's took, if one can say so."""
    seconds, compression = run.coding_seconds_per_element, run.compression
    assert seconds is not None
    fact = (
        f"coding: the run's took {1e9 * seconds:.3g} ns per element of a rank, copies and sums "
        "with it"
    )
    share = preset(run.preset, run.num_clusters).codes_wait
    slowdown = slowdown_of(compression, run.num_clusters, seconds, costs, share)
    if codec is not None:
        facts.append(f"{fact}; not planned with, as --codec is given")
    elif slowdown is None or slowdown == 0:
        facts.append(f"{fact}; not planned with, as it is of {run.codec}, not of one wire format")
    else:
        wire = f"{compression.wire}, " if isinstance(compression, Quantized) else ""
        name = f"{wire}copies and sums"
        facts.append(f"{fact}; so {name} are planned at {1 / slowdown:.3g} of those speeds")
        return slowed(costs, compression, slowdown)
    return costs


def _number(record: Any, key: str, path: Path) -> float:
    value = record.get(key) if isinstance(record, dict) else None
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise ValueError(f"{path} has no number {key!r}; write it by dsx net-test --json")
    return float(value)


def _count(path: Path | None, key: str) -> int | None:
    """Return a whole number of a measured line's file, None where it has none."""
    record = None if path is None else read_any_json(path)
    if not isinstance(record, dict) or key not in record:
        return None
    value = record[key]
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{path}: {key}={value!r} is no count; write it by dsx net-test --json")
    return value
