"""The model that a config.json describes, as transformers builds it: names, shapes, what is tied.

It is built on torch's meta device, so that no weight is made. transformers is imported here alone,
and only where it is installed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Architecture:
    """The tensors that a model loads, with their shapes.

    `tied`: to every further name of a shared tensor its first one. `made_by` names the class.
    """

    made_by: str
    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]


def is_transformers_installed() -> bool:
    """Whether an architecture can be asked for, without importing anything."""
    return importlib.util.find_spec("transformers") is not None


def architecture_of(
    config: Mapping[str, Any], path: Path, as_in_files: bool = False
) -> Architecture:
    """Return what transformers builds of a config.json; ValueError for what it does not know.

    `path` is where the configuration was read, for messages. `as_in_files`: the names and shapes
    that weights have in files, in the place of those that are trained.
    """
    transformers: Any = import_module("transformers")
    kind, library = config["model_type"], f"transformers {transformers.__version__}"
    unknown = ValueError(
        f"{path}: {library} has no causal language model of model_type {kind!r}; give the "
        "config.json of the model that was trained, or install the transformers that it was "
        "trained with"
    )
    try:
        settings = transformers.CONFIG_MAPPING[kind].from_dict(
            deepcopy(dict(config))
        )  # it is changed
    except KeyError:
        raise unknown from None
    except Exception as error:  # whatever a class makes of values it does not expect
        raise ValueError(f"{path}: {library} cannot read it: {error}") from error
    if type(settings) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise unknown
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(settings)
    model.tie_weights()
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    saved = _in_files(model, shapes)
    if as_in_files:
        shapes = saved
    else:
        _require_same_names_in_files(model, shapes, saved, path)
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied[name] = first[id(parameter)]
    return Architecture(f"{type(model).__name__} of {library}", shapes, tied)


def _in_files(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, tuple[int, ...]]:
    """Return the names and shapes that a model's weights have in files.

    From version 5 on transformers joins the experts of a mixture as it loads them.
    """
    try:
        loading: Any = import_module("transformers.core_model_loading")
    except ModuleNotFoundError:  # of version 4, which had nothing of the kind
        return shapes
    saved: Mapping[str, Any] = loading.revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in saved.items()}


def _require_same_names_in_files(
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    saved: Mapping[str, tuple[int, ...]],
    path: Path,
) -> None:
    """Refuse models whose weights lie in files otherwise than they are trained."""
    other = sorted(shapes.keys() - saved.keys())
    if other:
        raise ValueError(
            f"{path}: transformers trains the weights of {type(model).__name__} in another form "
            f"than it saves them ({other[0]} and {len(other) - 1} more); let the script write the "
            "folder: model.save_pretrained(DIR) inside `with engine.dsx.averaged():`"
        )
