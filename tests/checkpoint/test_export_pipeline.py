"""What `dsx export` takes from a pipeline's layer files: what is not trained, and tied copies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dsx.checkpoint.averaged_model import MODULE_FACTS, find_model
from dsx.checkpoint.weight_files import write_safetensors
from dsx.engines.deepspeed.files import read_untrained, write_universal
from tests.checkpoint.test_averaged_model import checkpoint, trained
from tests.simulated import Simulated

FACTS: dict[str, Any] = {
    "aliases": {},
    "buffers": ["1.count"],
    "places": {"0": "tied_modules.ends", "5": "stage_1.tied_modules.ends"},
    "tied": {"tied_modules.ends.weight": [0, 1]},
}
WEIGHT = torch.tensor([0.0, 1.0])


@pytest.fixture
def run() -> Simulated:
    return trained("diloco", 4)


def lay_out(base: Path, facts: dict[str, Any] = FACTS) -> None:
    """Write a pipeline's files beside the outer state, in every cluster."""
    for m in range(2):
        directory = base / f"cluster_{m}" / "a"
        torch.save({"module": None}, directory / "mp_rank_00_model_states.pt")
        layers = {
            0: {"weight": WEIGHT, "scale": torch.tensor([2.0])},
            1: {"gain": torch.tensor([3.0]), "count": torch.tensor([m])},
            5: {"weight": WEIGHT, "scale": torch.tensor([4.0])},
        }
        for place, tensors in layers.items():
            torch.save(tensors, directory / f"layer_{place:02d}-model_states.pt")
        (directory / MODULE_FACTS).write_text(json.dumps(facts))


def test_what_is_not_trained_comes_from_the_layers(run: Simulated, tmp_path: Path) -> None:
    base = checkpoint(run, tmp_path)
    lay_out(base)
    found = read_untrained(find_model(base, None))
    expected = {
        "tied_modules.ends.weight": [0.0, 1.0],  # frozen here: the run trains other layers
        "tied_modules.ends.scale": [2.0],
        "stage_1.tied_modules.ends.scale": [4.0],
        "1.gain": [3.0],
        "1.count": [0],  # a buffer: cluster 0's
    }
    assert {name: tensor.tolist() for name, tensor in found.items()} == expected


def test_a_tied_weight_is_written_once_and_its_places_are_named(
    run: Simulated, tmp_path: Path
) -> None:
    base = checkpoint(run, tmp_path)
    lay_out(base)
    model = find_model(base, None)
    name = "layers.1.weight"
    model.parameters["tied_modules.ends.weight"] = model.parameters[name]
    model.tensor = lambda name: torch.ones(model.parameters[name].shape)  # type: ignore[method-assign]
    untrained = read_untrained(model)
    assert "tied_modules.ends.weight" not in untrained
    written = write_safetensors(model, untrained, tmp_path, torch.float32, 10**9, print)
    with safe_open(str(written[0]), "pt") as file:
        metadata = {"format": "pt", "0.weight": "tied_modules.ends.weight"}
        assert file.metadata() == {**metadata, "5.weight": "tied_modules.ends.weight"}
        assert {"tied_modules.ends.weight", "1.gain"} <= set(file.keys())
        assert "5.weight" not in file.keys()  # noqa: SIM118 - not a mapping


@pytest.mark.parametrize(
    ("cluster", "place", "tensors", "said"),
    [
        (
            0,
            5,
            {"weight": -WEIGHT},
            r"copies of the tied tensor tied_modules\.ends\.weight differ ",
        ),
        (1, 1, {"gain": torch.tensor([3.5])}, r"1\.gain, which is not trained, differs between "),
        (1, 0, {"weight": WEIGHT, "scale": torch.tensor([2.5])}, r"tied_modules\.ends\.scale, wh"),
    ],
)
def test_what_differs_is_named(
    cluster: int,
    place: int,
    tensors: dict[str, torch.Tensor],
    said: str,
    run: Simulated,
    tmp_path: Path,
) -> None:
    """-0.0 is not 0.0."""
    base = checkpoint(run, tmp_path)
    lay_out(base)
    torch.save(tensors, base / f"cluster_{cluster}" / "a" / f"layer_{place:02d}-model_states.pt")
    with pytest.raises(ValueError, match=said):
        read_untrained(find_model(base, None))


def test_what_cannot_be_told_is_refused(run: Simulated, tmp_path: Path) -> None:
    base = checkpoint(run, tmp_path)
    lay_out(base, {"aliases": {}})
    model = find_model(base, None)
    model.parameters["tied_modules.ends.weight"] = model.parameters["layers.1.weight"]
    with pytest.raises(ValueError, match="saved by a dsx that did not note their places"):
        read_untrained(model)
    model.parameters["stage_1.tied_modules.ends.shift"] = model.parameters["layers.1.weight"]
    with pytest.raises(ValueError, match=r"one place for stage_1\.tied_modules\.ends\.shift"):
        write_universal(model, {}, tmp_path)
