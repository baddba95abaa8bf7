"""What a DeepSpeed checkpoint holds beside what dsx trains, read and written without an engine.

Known are the files of DeepSpeed 0.19 for ZeRO 0 to 3 without tensor parallelism: `mp_rank_00_
model_states.pt` with the whole module, or under ZeRO-3 one file per rank with buffers and shards of
frozen parameters; of pipelines `layer_<place>-model_states.pt`, with a tied layer in the file of
every place of its, and of pipelines with experts `mp_rank_<stage>_model_states.pt` with the stage's
module; `zero/<parameter>/` in universal checkpoints. They are Python pickles, read as pickles.py
says.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.averaged_model import SavedModel
from dsx.engines.deepspeed.pickles import find_code, read_pickle

WHOLE = "mp_rank_00_model_states.pt"
STAGES = "mp_rank_*_model_states.pt"
SHARDS = "zero_pp_rank_*_mp_rank_00_model_states.pt"
_COMPARED_AT_A_TIME = 1 << 28  # bytes


def read_untrained(model: SavedModel) -> dict[str, Tensor]:
    """Return frozen parameters and buffers by name: all of a tag that dsx does not train.

    They are cluster 0's. ValueError for a frozen parameter of which another cluster holds other
    bits; buffers may differ. Empty where DeepSpeed has written nothing (plain PyTorch).
    """
    found = _read_cluster(model, model.directory)
    for directory in model.directories[1:] if model.buffers is not None else ():
        for name, tensor in _read_cluster(model, directory).items():
            if name not in (model.buffers or ()) and not _has_same_bits(found.get(name), tensor):
                raise ValueError(
                    f"{name}, which is not trained, differs between {model.directory} and "
                    f"{directory}: the clusters have trained different models; load the same "
                    "frozen parameters in every cluster"
                )
    return found


def _read_cluster(model: SavedModel, directory: Path) -> dict[str, Tensor]:
    known = {*model.parameters, *model.aliases}
    if (directory / WHOLE).is_file():
        module: dict[str, Any] | None = read_pickle(directory / WHOLE)["module"]
        if module is None:
            return _read_layers(model, directory, known)
        found = _untrained(module, known)
        for stage in sorted(directory.glob(STAGES))[1:]:  # of a pipeline with experts
            own = _untrained(read_pickle(stage)["module"], known)
            for name in found.keys() & own.keys():
                if not _has_same_bits(found[name], own[name]):
                    raise ValueError(
                        f"{name}, which is not trained, has other values in {stage.name} than in "
                        "the stages before, where a tied layer has it too: save the model from "
                        "the script, inside `with engine.dsx.averaged()`"
                    )
            found |= own
        return found
    files = sorted(directory.glob(SHARDS), key=lambda f: int(f.name.split("_")[3]))
    if not files:
        return {}
    states = [read_pickle(file) for file in files]
    first = states[0]
    found = {n: first["module"][n] for n in first["buffer_names"] if n in first["module"]}
    for name, shape in (first["frozen_param_shapes"] or {}).items():
        parts = [state["frozen_param_fragments"][name].view(-1) for state in states]
        found[name] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape))
    return {name: tensor for name, tensor in found.items() if name not in known}


def _untrained(module: Mapping[str, Any], known: Collection[str]) -> dict[str, Tensor]:
    return {n: t for n, t in module.items() if n not in known and torch.is_tensor(t)}


def _read_layers(model: SavedModel, directory: Path, known: Collection[str]) -> dict[str, Tensor]:
    """Return what a pipeline's layer files hold beside trained parameters, and compare copies."""
    found: dict[str, Tensor] = {}
    seen: dict[str, tuple[Path, Tensor]] = {}  # what lies in several files
    for file in sorted(directory.glob("layer_*-model_states.pt")):
        place = str(int(file.name.split("-")[0].removeprefix("layer_")))
        for own_name, tensor in read_pickle(file).items():
            if not torch.is_tensor(tensor):
                continue
            name = model.name_at(place, own_name)
            if place in model.places:
                first, other = seen.setdefault(name, (file, tensor))
                if not _has_same_bits(other, tensor):
                    raise ValueError(
                        f"the copies of the tied tensor {name} differ between {first} and "
                        f"{file.name}: the stages have diverged; export another checkpoint, or "
                        "save the model from the script, inside `with engine.dsx.averaged()`"
                    )
            if name not in known:
                found[name] = tensor
    unknown = [n for n in (*known, *found) if n.startswith("tied_modules.")]
    if unknown and not model.places:
        raise ValueError(
            f"{directory} is a pipeline's with tied layers ({unknown[0]}), saved by a dsx that did "
            "not note their places: resume with this one and save again"
        )
    return found


def _has_same_bits(ours: Tensor | None, theirs: Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN and the sign of zero included."""
    if ours is None or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    return all(
        torch.equal(a, b)
        for a, b in zip(
            *(
                t.contiguous().view(-1).view(torch.uint8).split(_COMPARED_AT_A_TIME)
                for t in (ours, theirs)
            ),
            strict=True,
        )
    )


def write_universal(model: SavedModel, untrained: Mapping[str, Tensor], out: Path) -> Path:
    """Write DeepSpeed's universal checkpoint: averaged weights, cluster 0's optimizer states.

    DeepSpeed's own converter makes it, then every fp32 weight is replaced, and what is not trained
    added as it does for models that are no pipelines. ValueError with the reason where it cannot.
    Returns its directory, which `latest_universal` names.
    """
    for name in model.parameters:
        if name.startswith("stage_") and ".tied_modules." in name:
            raise ValueError(
                f"DeepSpeed's universal checkpoint has one place for {name} and for that of the "
                "tied layer's first stage; use --format safetensors"
            )
    try:
        from deepspeed.checkpoint.ds_to_universal import main as convert
    except ImportError as error:
        raise ValueError(
            '--format universal needs DeepSpeed: pip install "dsx-train[deepspeed]"'
        ) from error
    source, target = model.directory, out / model.directory.name
    if not list(source.glob("*_optim_states.pt")):
        raise ValueError(
            f"{source} has no *_optim_states.pt: DeepSpeed converts ZeRO checkpoints (stages 1 to "
            "3) only; use --format safetensors"
        )
    if target.exists():
        raise ValueError(f"{target} exists already: remove it, or give another --out")
    if trouble := find_code(sorted(source.glob("*.pt"))):  # the converter reads them unguarded
        raise ValueError(trouble)
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
    for name, tensor in untrained.items():
        path = target / "zero" / name / "fp32.pt"
        if not path.is_file():
            path.parent.mkdir(parents=True)
            torch.save({"param": tensor.float()}, path)
    return target


def _replace_weights(model: SavedModel, target: Path) -> None:
    """Write the averaged model over the converted weights, in place."""
    for name in model.parameters:
        path = target / "zero" / name / "fp32.pt"
        if not path.is_file():
            raise ValueError(f"DeepSpeed's converter has written no {path}; use another format")
        held, average = read_pickle(path), model.tensor(name)
        is_bare = isinstance(held, torch.Tensor)  # of ZeRO-3
        before: torch.Tensor = held if is_bare else held["param"]
        if before.numel() != average.numel():
            raise ValueError(
                f"{path} has {before.numel()} elements, the averaged parameter {average.numel()}"
            )
        after = average.view(before.shape)
        torch.save(after if is_bare else {**held, "param": after}, path)
    whole = target / WHOLE
    if whole.is_file():
        state = read_pickle(whole)
        for name, tensor in (state["module"] or {}).items():
            source = model.aliases.get(name, name)
            if source in model.parameters:
                state["module"][name] = model.tensor(source).to(tensor.dtype)
        whole.unlink()  # the converter's copy is as read-only as what it was made from
        torch.save(state, whole)
