"""Whether a run's tensors are those of the model that config.json describes, by name and shape.

What does not fit is refused, with what is missing and what is unexpected: `from_pretrained` would
fill in random weights for the one and drop the other, with a warning at most.

A tied weight is written once, under the name that the model ties the others to, and from_pretrained
ties it again. So config.json and the run have to agree on what is tied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel
from dsx.checkpoint.weight_files import Weights
from dsx.engines.hf_folder.architecture import Architecture

TIES = "tie_word_embeddings"
_SHOWN = 8  # names in a message
_SUMS_OF_MEGATRON = "masters.json"  # beside the outer state of a Megatron run


@dataclass(frozen=True)
class Tensors:
    """The shapes of a run's tensors, and to every further name of a shared one the one it has."""

    shapes: Mapping[str, tuple[int, ...]]
    aliases: Mapping[str, str]

    @staticmethod
    def of(weights: Weights, untrained: Mapping[str, Tensor]) -> Tensors:
        """Return those of a checkpoint."""
        found = {name: parameter.shape for name, parameter in weights.parameters.items()}
        known = {*found, *weights.aliases}
        found |= {n: tuple(t.shape) for n, t in untrained.items() if n not in known}
        return Tensors(found, {n: s for n, s in weights.aliases.items() if s in found})


def require_names_of_a_module(model: SavedModel) -> None:
    """Refuse, saying what serves instead, runs whose names are those of no Hugging Face model."""
    first = next(iter(model.parameters))
    is_of_megatron = (model.directory / _SUMS_OF_MEGATRON).is_file()
    if is_of_megatron or "embedding.word_embeddings.weight" in model.parameters:
        raise ValueError(
            f"{model.directory} is of a Megatron run and lacks dsx_megatron.json, which says what "
            "its model is and how its slices are joined: go on from it with this dsx and save it "
            "again (save_outer_state, which Megatron-LM's loop calls), or let Megatron Bridge "
            "convert Megatron's own checkpoint of this iteration, which holds the averaged model "
            "after finish() (AutoBridge.from_hf_pretrained(MODEL).export_ckpt(CHECKPOINT, DIR))"
        )
    if len(model.stages) > 1 or model.places:
        raise ValueError(
            f"{model.directory} is of a pipeline, whose parameters are named after the places of "
            f"its layers ({first}): write them under the names of your "
            "Hugging Face model from what dsx export RUN --out DIR writes"
        )
    if adapters := [name for name in model.parameters if re.search(r"\.lora_|\.modules_to_", name)]:
        raise ValueError(
            f"{model.directory} holds adapters of PEFT ({adapters[0]}): let the script write "
            "them, by model.save_pretrained(DIR) inside `with engine.dsx.averaged():`, as the "
            "Trainer's save_model does under dsx.run; they are merged into the weights from that "
            "folder, behind the run: AutoPeftModelForCausalLM.from_pretrained(DIR)"
            ".merge_and_unload()"
        )


def require_same(tensors: Tensors, architecture: Architecture, path: Path) -> None:
    """Raise ValueError unless a run's tensors are those of config.json's model, all of them."""
    tied, expected = architecture.tied, architecture.shapes
    found = {**tensors.shapes, **{n: tensors.shapes[s] for n, s in tensors.aliases.items()}}
    held = {tied.get(name, name) for name in found}
    missing = [n for n in expected if n not in tied and n not in held]
    unexpected = [n for n in found if n not in expected]
    other = [
        f"{n} is {list(found[n])} in the run and {list(expected[n])} there"
        for n in found
        if n in expected and found[n] != expected[n]
    ]
    if missing or unexpected or other:
        told = [
            f"{what}: {_listed(names)}"
            for what, names in (
                ("missing in the run", missing), ("unexpected", unexpected), ("shapes", other)
            )
            if names
        ]  # fmt: skip
        raise ValueError(
            f"{path} describes {architecture.made_by}, and the run has trained another model; "
            f"{'; '.join(told)}: give the config.json of the model that the script gave to dsx "
            "(the model itself, in no module of its own)"
        )
    first: dict[str, str] = {}
    for name in tensors.shapes:
        other_name = first.setdefault(tied.get(name, name), name)
        if other_name != name:
            raise ValueError(
                f"{path} ties {name} to {other_name}, and the run has trained them as two: set "
                f"{TIES} to false in it"
            )
    for name, source in tensors.aliases.items():
        if tied.get(name, name) != tied.get(source, source):
            raise _untied(path, name, source)


def left_out(
    tensors: Tensors, architecture: Architecture | None, config: Mapping[str, Any], path: Path
) -> set[str]:
    """Return the names of tied tensors that are not written: from_pretrained ties them again.

    Without an architecture config.json says so; where it does not, each is written twice.
    """
    if architecture is None and config.get(TIES) is False and tensors.aliases:
        raise _untied(path, *next(iter(tensors.aliases.items())))
    if architecture is None and not config.get(TIES):
        return set()
    if architecture is None:
        return set(tensors.aliases)
    shared = {*tensors.aliases, *tensors.aliases.values()}
    return {name for name in shared if architecture.tied.get(name) in shared}


def _untied(path: Path, name: str, source: str) -> ValueError:
    return ValueError(
        f"the run has trained {name} and {source} as one tensor, and {path} does not tie them: set "
        f"{TIES} to true in it"
    )


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
