"""The configuration that `dsx init` writes, and in words what it is and why."""

from __future__ import annotations

import inspect
import json
from dataclasses import dataclass
from typing import Any, cast

import dsx
from dsx.config.reference import meanings
from dsx.config.schema import load_config
from dsx.config.sections import (
    ClustersConfig,
    LinkConfig,
    MetricsConfig,
    StateConfig,
    check_clusters,
)
from dsx.core.units import format_bytes
from dsx.method.choices import PRESETS
from dsx.plan.candidate import Candidate
from dsx.plan.candidates import Search
from dsx.plan.coding_cores import with_cores
from dsx.plan.init.answers import Answers
from dsx.plan.offer import block_of, flags_of
from dsx.plan.question import Read
from dsx.plan.ranking import best_of_each, ranked

_SECTIONS: dict[str, type[Any]] = {
    "clusters": ClustersConfig, "metrics": MetricsConfig, "state": StateConfig, "link": LinkConfig,
}  # fmt: skip
_MEANING = {  # of DeepSpeed's keys
    "train_micro_batch_size_per_gpu": "sequences that a rank computes at a time; as many as fit",
    "gradient_accumulation_steps": "micro-batches per step: a cluster's batch is their product "
    "with its ranks, and has to be the same in all clusters",
    "gradient_clipping": "the largest norm of a step's gradients",
    "bf16": "weights in bf16, fp32 masters; left out: fp32",
    "zero_optimization": "what a cluster's ranks share: 1 optimizer states, 2 gradients, too, 3 "
    "weights, too",
    "optimizer": 'the inner optimizer; "torch_adam" is PyTorch\'s, without it DeepSpeed compiles '
    "its own at the first use",
}


@dataclass(frozen=True)
class Inner:
    """The numbers of DeepSpeed's own part."""

    micro_batch: int = 1
    zero: int = 1
    lr: float = 3e-4
    is_bf16: bool = True


@dataclass(frozen=True)
class Choice:
    """What the planner has chosen, and its "dsx" block."""

    read: Read
    best: Candidate
    block: dict[str, Any]
    data_parallel: float

    @property
    def words(self) -> list[str]:
        """What it will do, a sentence each."""
        question, best = self.read.question, self.best
        reached = 100 * best.prediction.utilization
        lines = [
            f"`{best.preset}`, H={best.interval}: {reached:.1f} % of the time is computing, where "
            f"data parallel over this line would be {100 * self.data_parallel:.3g} %.",
            f"A cluster sends {format_bytes(best.bytes_per_day)} a day.",
        ]
        if best.prediction.utilization < question.target:
            lines.append(
                f"No method reaches {100 * question.target:g} % on this line: this comes nearest; "
                "`dsx plan` with the same options says what would."
            )
        if not best.is_fitting:
            lines.append("It needs more memory than --memory-limit: see `dsx plan`.")
        return lines


def choose(answers: Answers, name: str) -> Choice:
    """Return the planner's first choice; ConfigError for a rendezvous that is none."""
    read = answers.read()
    search = Search(read.question)
    best = best_of_each(ranked(search.candidates(), read.question))[0]
    (best,) = with_cores([best], search)
    block = block_of(best, read.question)
    rendezvous = answers.rendezvous or "env://"
    block["clusters"]["rendezvous"] = rendezvous
    if rendezvous != "env://":
        block["clusters"]["store"] = "standalone"
    block["metrics"] = {"dir": f"runs/{name}"}
    check_clusters(load_config({"dsx": block}).clusters)
    return Choice(read, best, block, search.data_parallel().utilization)


def as_json(choice: Choice, inner: Inner) -> dict[str, Any]:
    """Return the DeepSpeed JSON."""
    precision = {"bf16": {"enabled": True}} if inner.is_bf16 else {}
    parameters = {
        "lr": inner.lr, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True,
    }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": inner.micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        **precision,
        "zero_optimization": {"stage": inner.zero},
        "optimizer": {"type": "AdamW", "params": parameters},
        "dsx": choice.block,
    }


def notes(choice: Choice, document: dict[str, Any], file: str) -> str:
    """Return the page beside a JSON, which has no comments: what each key of it means."""
    lines = [
        f"# {file}",
        "",
        f"Written by `dsx init` (dsx {dsx.__version__}). {_given(choice)}",
        "",
    ]
    lines += ["", *choice.words, "", "| key | value | meaning |", "| --- | --- | --- |"]
    lines += [
        f"| `{key}` | `{json.dumps(value)}` | {_MEANING[key]} |"
        for key, value in document.items()
        if key != "dsx"
    ]
    lines += [
        f"| `dsx.{key}` | `{json.dumps(value)}` | {meaning.replace('|', chr(92) + '|')} |"
        for key, value, meaning in explained(choice.block)
    ]
    start = f"deepspeed --num_gpus N --module dsx.run SCRIPT --deepspeed_config {file}"
    if choice.block["clusters"]["rendezvous"] == "env://":
        how = ["One launcher over the hosts of all clusters:"]
    else:
        port = choice.block["clusters"]["rendezvous"].rpartition(":")[2]
        how = [f"First `dsx rendezvous --port {port}` where they meet; one launcher per cluster M:"]
        start += " --dsx-cluster-id M"
    lines += ["", f"Look at it with `dsx doctor {file}`.", *how, "", f"    {start}", ""]
    return "\n".join(lines)


def as_flags(choice: Choice) -> str:
    """Return a file of Megatron's flags, commented; the model's and Megatron's own belong in it."""
    lines = [f"# Written by dsx init (dsx {dsx.__version__}). {_given(choice)}"]
    lines += [f"# {sentence.replace('`', '')}" for sentence in choice.words]
    lines += ["# Megatron's own flags belong into this file, too."]
    for key, value, meaning in explained(choice.block):
        section, _, leaf = key.partition(".")
        flag = flags_of({section: {leaf: value} if leaf else value})
        lines += ["", f"# {meaning}", flag if not isinstance(value, str) else _quoted(flag)]
    return "\n".join([*lines, ""])


def _quoted(flag: str) -> str:
    name, _, text = flag.partition(" ")
    return f"{name} '{text}'" if set(text) & set(" \"#'") else flag


def explained(block: dict[str, Any]) -> list[tuple[str, Any, str]]:
    """Return key, value and meaning of every leaf of a block."""
    config = load_config({"dsx": block})
    leaves = [("preset", block["preset"], _first_line(PRESETS[block["preset"]]))]
    for section, values in block.items():
        if not isinstance(values, dict):
            continue
        kind: type[Any] = _SECTIONS.get(section) or type(getattr(config.method, section))
        texts = meanings(kind)
        for key, value in cast("dict[str, Any]", values).items():
            leaves.append((f"{section}.{key}", value, texts.get(key) or _first_line(kind)))
    return leaves


def _first_line(described: Any) -> str:
    text = (inspect.getdoc(described) or "").partition("\n\n")[0]
    return " ".join(text.split())


def _given(choice: Choice) -> str:
    question = choice.read.question
    return (
        f"For {question.num_clusters} clusters of {question.model.ranks} ranks, a model of "
        f"{question.model.numel:.4g} parameters, {question.step_seconds:.4g} s a step, and "
        f"{question.link.bits_per_second / 1e9:.4g} Gbit/s, "
        f"{1000 * question.link.latency_seconds:.3g} ms one way."
    )
