"""The base of rotary positions that a config.json leaves out: families differ in their default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.from_config import notes_of_config
from tests.engines.test_megatron_dist import model


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_mixtral_has_to_give_its_base_in_either_form(kind: str, tmp_path: Path) -> None:
    """Mixtral's default in transformers is 1e6, the others' 1e4."""
    path = tmp_path / "config.json"
    config = {k: v for k, v in family_of(model(kind)[2], path).config.items() if k != "rope_theta"}
    path.write_text(json.dumps(config))
    if kind == "mixtral":
        with pytest.raises(ValueError, match="does not give rope_theta: add it"):
            notes_of_config(path)
    else:
        assert notes_of_config(path).rotary["base"] == 10000.0
    for given in ({"rope_theta": 5000.0}, {"rope_parameters": {"rope_theta": 5000.0}}):
        path.write_text(json.dumps({**config, **given}))
        assert notes_of_config(path).rotary["base"] == 5000.0
