"""What a DeepSpeed checkpoint holds beside what dsx trains, read and written without an engine.

Known are the files of DeepSpeed 0.19 for ZeRO 0 to 3 without tensor parallelism: `mp_rank_00_
model_states.pt` with the whole module, or under ZeRO-3 one file per rank with buffers and shards of
frozen parameters; `zero/<parameter>/` in universal checkpoints. They are Python pickles, which can
run code: read your own only.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.export_model import SavedModel

WHOLE = "mp_rank_00_model_states.pt"
SHARDS = "zero_pp_rank_*_mp_rank_00_model_states.pt"


def read_untrained(directory: Path, known: Collection[str]) -> dict[str, Tensor]:
    """Return frozen parameters and buffers of a tag, by name: all that is not in `known`.

    Empty where DeepSpeed has written nothing (plain PyTorch).
    """
    if (directory / WHOLE).is_file():
        module: dict[str, Any] | None = _load(directory / WHOLE)["module"]
        if module is None:
            _require_all_trained(directory, known)
            return {}
        return {n: t for n, t in module.items() if n not in known and torch.is_tensor(t)}
    files = sorted(directory.glob(SHARDS), key=lambda f: int(f.name.split("_")[3]))
    if not files:
        return {}
    states = [_load(file) for file in files]
    first = states[0]
    found = {n: first["module"][n] for n in first["buffer_names"] if n in first["module"]}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        parts = [state["frozen_param_fragments"][name].view(-1) for state in states]
        found[name] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape))
    return {name: tensor for name, tensor in found.items() if name not in known}


def _require_all_trained(directory: Path, known: Collection[str]) -> None:
    """Raise ValueError for a pipeline's layers that hold more than trained parameters."""
    names = {
        f"{int(file.name.split('-')[0].split('_')[1])}.{name}"
        for file in directory.glob("layer_*-model_states.pt")
        for name, tensor in _load(file).items()
        if torch.is_tensor(tensor)
    }
    extra = sorted(names - set(known))
    if extra:
        raise ValueError(
            f"{directory} is a pipeline's, with tensors that are not trained there, or tied copies "
            f"of others, e.g. {', '.join(extra[:3])}: their place in a model is not known from "
            "files; save the model from the script, inside `with engine.dsx.averaged()`"
        )


def write_universal(model: SavedModel, out: Path) -> Path:
    """Write DeepSpeed's universal checkpoint: averaged weights, cluster 0's optimizer states.

    DeepSpeed's own converter makes it, then every fp32 weight is replaced. ValueError with the
    reason where it cannot. Returns its directory, which `latest_universal` names.
    """
    try:
        from deepspeed.checkpoint.ds_to_universal import main as convert
    except ImportError as error:
        raise ValueError(
            "--format universal needs DeepSpeed: pip install 'dsx[deepspeed]'"
        ) from error
    source, target = model.directory, out / model.directory.name
    if not list(source.glob("*_optim_states.pt")):
        raise ValueError(
            f"{source} has no *_optim_states.pt: DeepSpeed converts ZeRO checkpoints (stages 1 to "
            "3) only; use --format safetensors"
        )
    if target.exists():
        raise ValueError(f"{target} exists already: remove it, or give another --out")
    arguments = argparse.Namespace(
        input_folder=str(source),
        output_folder=str(target),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            convert(arguments)
    except KeyError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ValueError(
            f"DeepSpeed's converter misses {error} in {source}: it knows optimizers with Adam's "
            "moments only; use --format safetensors"
        ) from error
    _replace_weights(model, target)
    return target


def _replace_weights(model: SavedModel, target: Path) -> None:
    """Write the averaged model over the converted weights, in place."""
    for name in model.parameters:
        path = target / "zero" / name / "fp32.pt"
        if not path.is_file():
            raise ValueError(f"DeepSpeed's converter has written no {path}; use another format")
        held, average = _load(path), model.tensor(name)
        if held["param"].numel() != average.numel():
            raise ValueError(
                f"{path} has {held['param'].numel()} elements, the averaged parameter "
                f"{average.numel()}"
            )
        torch.save({**held, "param": average.view(held["param"].shape)}, path)
    whole = target / WHOLE
    if whole.is_file():
        state = _load(whole)
        for name, tensor in (state["module"] or {}).items():
            source = model.aliases.get(name, name)
            if source in model.parameters:
                state["module"][name] = model.tensor(source).to(tensor.dtype)
        torch.save(state, whole)


def _load(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=False)
