"""What dsx can say when something is wrong, found in its source: errors, warnings, logged ones."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.pages import ROOT
from tests.garbage import not_collecting

VALUE = "\u2026"
NOT_FOR_USERS = {"AssertionError", "AttributeError", "IndexError", "TypeError", "SystemExit"}
AREAS = {  # by where it is raised; the first that fits
    "dsx/config": "Reading a configuration",
    "dsx/method": "Settings of a method",
    "dsx/compress": "Settings of a compressor",
    "dsx/core": "Values of any setting",
    "dsx/comm": "Meeting, and while clusters exchange",
    "dsx/outer": "What is sent and applied",
    "dsx/engines/deepspeed": "DeepSpeed",
    "dsx/engines/megatron": "Megatron-core",
    "megatron_patches": "Megatron-LM's training loop",
    "dsx/engines": "Attaching to an engine",
    "dsx/training": "Start and end of a run",
    "dsx/checkpoint": "Checkpoints and exports",
    "dsx/run": "python -m dsx.run",
    "dsx/support": "dsx support",
    "dsx/telemetry": "Records, reports and traces",
    "dsx/data": "Data",
    "dsx/plan": "dsx memory, dsx plan, dsx simulate",
    "dsx/bench": "dsx bench, dsx net-test",
    "dsx": "Elsewhere",
}


@dataclass(frozen=True)
class Message:
    """One message; `text` has an ellipsis where values stand."""

    kind: str
    text: str
    area: str

    @property
    def anchor(self) -> str:
        """Return its first words, as the end of an address."""
        words = re.findall(r"[a-z]+", self.text.lower().replace(VALUE, " "))
        return "-".join(["m", *words[:9]])


def sources() -> list[Path]:
    return sorted([*(ROOT / "dsx").rglob("*.py"), *(ROOT / "megatron_patches").rglob("*.py")])


@functools.cache
def _classes_and_calls() -> dict[Path, tuple[list[ast.ClassDef], list[ast.Call]]]:
    """The classes and the calls with arguments of each source, in the order of `ast.walk`."""
    found: dict[Path, tuple[list[ast.ClassDef], list[ast.Call]]] = {}
    with not_collecting():
        for path in sources():
            own, calls = found[path] = ([], [])
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    own.append(node)
                elif isinstance(node, ast.Call) and node.args:
                    calls.append(node)
    return found


@functools.cache
def classes() -> frozenset[str]:
    """Return the names of the exceptions and warnings that are defined here."""
    found: dict[str, set[str]] = {}
    for own, _ in _classes_and_calls().values():
        for node in own:
            found[node.name] = {ast.unparse(base) for base in node.bases}
    known = re.compile(r"(Error|Exception|Warning)$")

    def is_one(name: str) -> bool:
        return any(known.search(base) or is_one(base) for base in found.get(name, ()))

    return frozenset(name for name in found if is_one(name))


@functools.cache
def messages() -> tuple[Message, ...]:
    """Every message, once, in the order of areas and of the text."""
    own = classes()
    found: dict[tuple[str, str], Message] = {}
    for path, (_, calls) in _classes_and_calls().items():
        name = str(path.relative_to(ROOT))
        area = next(title for place, title in AREAS.items() if name.startswith(place))
        for call in calls:
            for kind, text in _said(call, own):
                if len(re.findall(r"[a-z]{2,}", text)) >= 2:  # more than a value passed on
                    found.setdefault((area, text), Message(kind, text, area))
    order = list(AREAS.values())
    in_order = sorted(found.values(), key=lambda m: (order.index(m.area), m.text.lower(), m.kind))
    return tuple(in_order)


def _said(node: ast.Call, own: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (class, text) of a call that makes an exception, warns, or logs a warning."""
    called = _last_name(node.func)
    is_error = called in own or re.fullmatch(r"[A-Z]\w*Error", called)
    if called in NOT_FOR_USERS or not (is_error or called in {"warn", "warning", "error"}):
        return
    if called == "error" and not ast.unparse(node.func).startswith(("logger.", "log.")):
        return
    kind = {"warn": "warning", "warning": "log", "error": "log"}.get(called, called)
    if called == "warn" and len(node.args) > 1:
        kind = ast.unparse(node.args[1])
    text = _template(node.args[0])
    if kind == "log":
        text = re.sub(r"%(r|s|d|\.?\d*[gf])", VALUE, text)
    yield kind, re.sub(rf"{VALUE}(\s*{VALUE})+", VALUE, " ".join(text.split()))


def _last_name(function: ast.expr) -> str:
    """Return what is called, without what stands before its last dot; empty if it has no name."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _template(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(value) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _template(node.left) + _template(node.right)
    return VALUE
