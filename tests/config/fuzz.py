"""Blocks that fit the schema, and what people put in their places: for tests of what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from dsx.config.reference import json_schema
from dsx.method.choices import PRESETS

Document = dict[str, Any]
NUMBERS = [0, -1, 1, 2**31, 2**53 + 1, 10**30, 0.5, -0.0, 1e30, 1e300, float("inf"), float("nan")]
TEXTS = ["", " ", "5", "0.5", "true", "null", "x" * 5000, "a\0b", "\ud800", "naïve", "[", "tcp://"]
CONTAINERS = [[], {}, [[]], [1, 2, 3], ["x"], {"a": 1}, [None], {"type": "x"}, {"": {}}]
OF_PYTHON = [
    Path("runs"), np.int64(7), np.float32(0.5), np.bool_(True), torch.bfloat16, torch.tensor(3),
    b"runs", {"x"}, {1: 2}, {(1, 2): 3}, object(), 3 + 4j, range(3), len, float,
]  # fmt: skip
JUNK = [None, True, False, *NUMBERS, *TEXTS, *CONTAINERS, *OF_PYTHON]
FIX = re.compile(
    r"[;:,] (?:or )?(?:try|use|give|leave|set|add|write|keep|raise|did you mean|save|choose|let)\b|"
    r"Allowed: "
)


@cache
def schema() -> dict[str, Any]:
    """Return what `dsx config schema` says of the block."""
    return json_schema()["properties"]["dsx"]


def values(kind: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Return a strategy of what a schema allows; numbers are those of usual runs, and the ends."""
    if "anyOf" in kind:
        return st.one_of([values(one) for one in kind["anyOf"]])
    if "const" in kind or "enum" in kind:
        return st.sampled_from(kind.get("enum", [kind.get("const")]))
    of = kind.get("type")
    if of in ("integer", "number"):
        return _numbers(kind, is_whole=of == "integer")
    if of == "array":
        items = kind.get("items") or kind["prefixItems"][0]
        return st.lists(
            values(items), min_size=kind.get("minItems", 0), max_size=kind.get("maxItems", 3)
        )
    if of == "object":
        return objects(kind)
    return {"boolean": st.booleans(), "null": st.none()}.get(of, st.sampled_from(["x", "runs/a"]))


def _numbers(kind: Mapping[str, Any], is_whole: bool) -> st.SearchStrategy[Any]:
    low = kind.get("minimum", kind.get("exclusiveMinimum", 0))
    high = kind.get("maximum", kind.get("exclusiveMaximum", 2**53))
    inside = [v for v in (1, 2, 3, 8, 20, 100, 0.5, 0.9, low, high) if low <= v <= high]
    if "exclusiveMinimum" in kind:
        inside = [v for v in inside if v > low]
    if "exclusiveMaximum" in kind:
        inside = [v for v in inside if v < high]
    return st.sampled_from([v for v in inside if not is_whole or v == int(v)]).map(
        int if is_whole else float
    )


def objects(kind: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of objects with some of the keys."""
    properties = kind["properties"]
    needed = {key: values(properties[key]) for key in kind.get("required", ())}
    rest = {key: values(one) for key, one in properties.items() if key not in needed}
    return st.fixed_dictionaries(needed, optional=rest)


def blocks() -> st.SearchStrategy[Document]:
    """Return a strategy of documents whose block fits the schema, key by key."""
    properties = schema()["properties"]
    clusters = objects(properties["clusters"]).map(lambda given: {"num_clusters": 2, **given})
    others = {
        key: values(one) for key, one in properties.items() if key not in ("preset", "clusters")
    }
    block = st.fixed_dictionaries(
        {"preset": st.sampled_from(list(PRESETS)), "clusters": clusters}, optional=others
    )
    return block.map(lambda found: {"dsx": found})


@st.composite
def mutations(draw: st.DrawFn) -> tuple[Document, tuple[str, ...]]:
    """Return a document with something wrong in one place, perhaps, and that place."""
    preset = draw(st.sampled_from(list(PRESETS)))
    document: Document = {"dsx": {"preset": preset, "clusters": {"num_clusters": 2}}}
    properties = schema()["properties"]
    section = draw(st.sampled_from(list(properties)))
    junk = st.sampled_from(JUNK)
    way = draw(st.sampled_from(["value", "value", "value", "section", "typo", "gone", "key"]))
    block = document["dsx"]
    keys = sorted(_keys(properties[section]))
    if way == "section" or not keys:
        block[section] = draw(junk)
        return document, (section,)
    key = draw(st.sampled_from(keys))
    if way == "gone":
        block.get(section, block).pop(key, None)
        return document, (section,)
    if way == "typo":
        key = draw(st.sampled_from([key[1:], key + "s", key.upper(), key.replace("_", "-"), ""]))
    if way == "key":
        key = draw(st.sampled_from([1, None, True, ("a", 1), 2.5, "\ud800", b"x"]))  # type: ignore
    block.setdefault(section, {})[key] = draw(junk)
    return document, (section, key)


def _keys(kind: Mapping[str, Any]) -> set[str]:
    variants = [kind, *kind.get("anyOf", ())]
    return {key for one in variants for key in one.get("properties", ())}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def follow(document: Document, message: str) -> Document | None:
    """Return the document as a message advises to change it; None if it has no such words."""
    key = re.match(r"dsx((?:\.\w+)+)(?:=|\[| )", message)
    if key is None:
        return None
    path = key[1][1:].split(".")
    changed = copy.deepcopy(document)
    parent = changed["dsx"]
    for part in path[:-1]:
        parent = parent.setdefault(part, {})
    written = re.search(r"; (?:write|try) (.+)$", message)
    if written and _is_json(written[1]):
        parent[path[-1]] = json.loads(written[1])
    elif re.search(r"; leave it out(?: for .*)?$", message):
        parent.pop(path[-1])
    elif near := re.search(r"did you mean '(\w+)'\?", message):
        if "is not a known key" in message:
            parent[near[1]] = parent.pop(path[-1])
        else:
            parent[path[-1]] = near[1]
    elif bound := re.search(r"; use (\w+) [<>]= (\d+)", message):
        for axis in changed["dsx"].values():
            if isinstance(axis, dict):
                axis.pop(bound[1], None)
        owner = next(a for a in re.findall(r"(\w+)\." + bound[1], message) or [path[0]])
        changed["dsx"].setdefault(owner, {})[bound[1]] = int(bound[2])
    else:
        return None
    return changed
