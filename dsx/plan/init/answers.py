"""What `dsx init` has to know: from flags, or asked for on a terminal."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from dsx.plan.question import Given, Read, read_question

Ask = Callable[["Missing"], str]


@dataclass(frozen=True)
class Answers(Given):
    """The flags of `dsx init`: the planner's, and where clusters meet; None is not told yet."""

    rendezvous: str | None = None

    def read(self) -> Read:
        """Return the planner's question; ValueError for a number out of bounds."""
        return read_question(self)


class Missing(NamedTuple):
    """Something to ask for: a flag, the question, its type, and what an empty answer means."""

    name: str
    question: str
    kind: type
    default: str | None = None

    @property
    def option(self) -> str:
        """The flag."""
        return f"--{self.name.replace('_', '-')}"


def first_missing(answers: Answers, is_asked: bool) -> Missing | None:
    """Return what is to be told next, None if nothing is; `is_asked`: what has a default, too."""
    found = [
        ("clusters", "How many clusters (sites) train together?", int, "2"),
        ("rendezvous", "Where do they meet: env:// (one launcher over all), or tcp://HOST:PORT?",
         str, "env://"),
        ("params", "How many parameters does the model have (7e9)?", float, None),
        ("layers", "How many layers?", int, None),
        ("hidden", "How wide is it (0: leave low rank out)?", int, "0"),
        ("gpus_per_cluster", "How many accelerators does a cluster have?", int, None),
        ("step_seconds", "How many seconds does a step of one cluster take (0: estimate it)?",
         float, "0"),
        ("gpu", "Which accelerator: a100, a800 or h100?", str, None),
        ("tokens_per_step", "How many tokens are in a step of one cluster?", float, None),
        ("gbps", "How many Gbit/s does a cluster's line carry, each way?", float, None),
        ("latency_ms", "How many ms does it take, one way?", float, "0"),
    ]  # fmt: skip
    has_default = {"rendezvous", "hidden", "latency_ms"}
    for name, question, kind, default in found:
        is_told = getattr(answers, name) is not None
        if is_told or not _is_open(name, answers):
            continue
        if is_asked or name not in has_default:
            return Missing(name, question, kind, default)
    return None


def _is_open(name: str, answers: Answers) -> bool:
    """Whether an answer is needed beside what is told already."""
    if name == "step_seconds":
        return answers.gpu is None
    if name in ("gpu", "tokens_per_step"):
        return not answers.step_seconds
    return not (name in ("gbps", "latency_ms", "clusters") and answers.link is not None)


def complete(answers: Answers, ask: Ask | None) -> Answers:
    """Return all that is needed; without `ask`, ValueError with the flags that are missing."""
    if ask is None:
        missing: list[str] = []
        left = answers
        while gap := first_missing(left, is_asked=False):
            missing.append("--step-seconds, or --gpu with --tokens-per-step"
                           if gap.name == "step_seconds" else gap.option)  # fmt: skip
            left = replace(left, **{gap.name: 1})
        if missing:
            raise ValueError(
                f"stdin is no terminal to ask on, and these are missing: {'; '.join(missing)}"
            )
        return answers
    while gap := first_missing(answers, is_asked=True):
        answers = replace(answers, **{gap.name: _parsed(gap, ask)})
    seconds = answers.step_seconds or None  # 0 was the answer that asks for an estimate
    return replace(answers, hidden=answers.hidden or None, step_seconds=seconds)


def _parsed(gap: Missing, ask: Ask) -> Any:
    """Return an answer of the right type, asked for until there is one."""
    while True:
        text = ask(gap).strip() or gap.default or ""
        try:
            return gap.kind(text)
        except ValueError:
            continue
