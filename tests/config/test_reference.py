"""The configuration reference and the JSON Schema: of today, complete, and true."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.files import ConfigError
from dsx.config.reference import json_schema, markdown, meanings
from dsx.config.schema import load_config
from dsx.config.sections import Block
from dsx.core import renamed
from dsx.core.registry import FORMER
from dsx.core.renamed import RenamedWarning
from dsx.method.choices import AXES

ROOT = Path(__file__).parents[2]
FILES = {"reference": "docs/configuration.md", "schema": "docs/dsx.schema.json"}
SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)  # without looking through the schema each time
CONFIGS = [p for p in sorted((ROOT / "configs").rglob("*.json")) if "grafana" not in p.parts]


@pytest.mark.parametrize(("command", "path"), FILES.items())
def test_the_files_in_docs_are_those_of_today(command: str, path: str) -> None:
    made = CliRunner().invoke(app, ["config", command])
    assert made.exit_code == 0
    told = f"{path} is stale; make it anew with: dsx config {command} > {path}"
    assert (ROOT / path).read_text() == made.stdout, told


def test_every_key_says_what_it_means() -> None:
    for kind in [k for _, choices in AXES.values() for k in choices.values()]:
        assert set(meanings(kind)) >= {f.name for f in dataclasses.fields(kind)}, kind
    sections: list[Any] = [f.annotation for f in Block.model_fields.values()]
    for model in (Block, *(s for s in sections if hasattr(s, "model_fields"))):
        assert set(meanings(model)) >= set(model.model_fields), model
    for line in markdown().splitlines():  # a whole sentence in each row
        cells = line.strip("| ").split(" | ")
        if line.startswith("| `") and len(cells) >= 4:
            assert cells[-1].endswith(".") and len(cells[-1].split()) >= 4, line


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_the_schema_takes_every_config_that_ships(path: Path) -> None:
    VALIDATOR.validate(json.loads(path.read_text()))


@pytest.mark.parametrize(
    "change",
    [
        {"preset": "diloko"},
        {"shedule": {}},
        {"clusters": {}},
        {"clusters": {"num_clusters": 0}},
        {"schedule": {"interval": "20"}},
        {"schedule": {"intervall": 20}},
        {"delay": {"type": "blocking", "alpha": 0.5}},
        {"delay": {"type": "blent"}},
        {"outer_optimizer": {"type": "adam", "betas": [0.9]}},
        {"link": {"streams": 65}},
        {"compression": {"wire": "int3"}},
        {"fragments": {"by": "layer", "num_fragments": 0}},
        {"schedule": {"interval": 0}},
        {"schedule": {"type": "adaptive", "gamma": 1.5}},
        {"schedule": {"type": "adaptive", "step_seconds": 0}},
        {"delay": {"type": "streaming", "steps": -1}},
        {"delay": {"type": "compensation", "steps": 0}},
        {"delay": {"type": "streaming", "steps": 1, "alpha": 0}},
        {"delay": {"type": "eager", "outer_steps": 3}},
        {"outer_optimizer": {"lr": 0}},
        {"outer_optimizer": {"momentum": 1}},
        {"outer_optimizer": {"type": "adam", "lr": 1, "betas": [0.9, 1]}},
        {"compression": {"type": "quantized", "error_feedback": "fp32", "feedback_decay": 1.1}},
        {"compression": {"type": "low_rank", "rank": 0}},
        {"compression": {"type": "low_rank", "rank": 4, "full_round_every": 1}},
        {"compression": {"type": "top_k", "chunk": 4097}},
        {"control": {"type": "adaptive_rank", "rank": 8, "target": 1}},
    ],
)
def test_the_schema_refuses_what_loading_refuses(change: dict[str, Any]) -> None:
    good: dict[str, Any] = {"dsx": {"preset": "diloco", "clusters": {"num_clusters": 2}}}
    VALIDATOR.validate(good)
    bad = copy.deepcopy(good)
    bad["dsx"].update(change)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(bad)
    with pytest.raises(ConfigError):
        load_config(bad)


@pytest.mark.parametrize(
    ("axis", "old", "new"), [(axis, *pair) for axis in FORMER for pair in FORMER[axis].items()]
)
def test_old_names_that_still_work_are_deprecated_ones(
    axis: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(renamed, "_told", set())
    fields = {field.name: 1 for field in dataclasses.fields(AXES[axis].choices[new])}
    preset = {"preset": "diloco", "clusters": {"num_clusters": 2}}
    given = {"dsx": {**preset, axis: {AXES[axis].selector: old, **fields}}}
    VALIDATOR.validate(given)
    with pytest.warns(RenamedWarning):
        load_config(given)
    variants = SCHEMA["properties"]["dsx"]["properties"][axis]["anyOf"]
    names = [v["properties"][AXES[axis].selector].get("anyOf", ()) for v in variants]
    assert [{"const": new}, {"const": old, "deprecated": True}] in names


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
