"""`fit(ckpt_path=...)`: the checkpoint that all clusters have, and the outer state that it holds.

"last" is the newest one that is complete and good in all clusters; a path is looked for in each
cluster's own folder. If any cluster resumes, all do.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dsx.checkpoint.checksums import MANIFEST
from dsx.checkpoint.remote import open_remote
from dsx.checkpoint.tags import cluster_directory
from dsx.engines.resume_point import choose
from dsx.run.lightning.checkpoints import FILE, SUFFIX, link, tag_of, writes_folder
from dsx.run.lightning.fit import Fit, fit_of, has_engine, is_fitting
from dsx.run.lightning.hooks import around, known_to, modules_of
from dsx.run.lightning.places import base_of_checkpoints, own_place

_NEWEST = ("last", "hpc")


def replace_resume(root: str) -> None:
    """Let `fit` go on from what all clusters have, weights and optimizers before outer state."""
    module = modules_of(root)
    connector = module("trainer.connectors.checkpoint_connector")._CheckpointConnector
    around(connector, "_select_ckpt_path", _select)
    around(connector, "resume_start", _start)
    around(connector, "restore_training_state", _restore)
    around(module("strategies.deepspeed").DeepSpeedStrategy, "load_checkpoint", _load_engine)


def _select(
    original: Callable[..., Any], connector: Any, state_fn: Any, ckpt_path: Any, **more: bool
) -> Any:
    """Return the path to load. Collective over all ranks of all clusters for `fit`."""
    trainer = connector.trainer
    fit = fit_of(trainer)
    if fit is None:
        return original(state_fn, ckpt_path, **more)
    if not is_fitting(trainer):
        return _for_evaluation(original(state_fn, ckpt_path, **more), fit)
    asked = ckpt_path or (connector._ckpt_path if connector._user_managed else None)
    connector._user_managed = False
    if asked is not None and asked not in _NEWEST:
        asked = str(original(state_fn, asked, **more))
    bases, wanted = _where(asked, trainer, fit)
    told = fit.world.rendezvous.gather("checkpoint of Lightning", [asked is not None, wanted])
    if not any(is_asked for is_asked, _ in told):
        return None
    wanted = next(tag for is_asked, tag in told if is_asked)
    found = _common(fit, bases, wanted)
    if found is None:
        return original(state_fn, "last", **more)  # which warns that there is nothing
    base, source, tag = found
    fit.resume = cluster_directory(base, source) / tag
    _require_same_number(fit)
    _link_again(fit)
    fit.resume_tag = fit.world.rendezvous.gather("tag to go on from", tag)[0]
    return str(fit.resume if writes_folder(trainer.strategy) else fit.resume / FILE)


def _where(asked: Any, trainer: Any, fit: Fit) -> tuple[list[Path], str | None]:
    """Return the folders to look in, and the tag that is wanted there, if it has a name."""
    if asked is not None and asked not in _NEWEST:
        path = own_place(asked, fit.world.cluster_id)
        if path.is_symlink():
            path = path.resolve()
        return [path.parents[1]], tag_of(path, trainer.strategy)
    callbacks = [one for one in trainer.checkpoint_callbacks if hasattr(one, "save_top_k")]
    bases = [base_of_checkpoints(one, trainer) for one in callbacks]
    return list(dict.fromkeys([*bases, Path(trainer.default_root_dir).absolute()])), None


def _common(fit: Fit, bases: list[Path], wanted: str | None) -> tuple[Path, int, str] | None:
    """Return where the newest good checkpoint is, by its folder, cluster and tag.

    None where none is wanted by name, and no cluster has any.
    """
    rendezvous, remote = fit.world.rendezvous, open_remote(fit.checkpoints)
    chosen: list[tuple[int, Path, int, str]] = []
    for base in bases:
        try:
            source, tag = choose(
                lambda value: rendezvous.gather("checkpoints", value), fit.world, base, wanted,
                remote=remote if base == bases[0] else None,  # of one folder
            )  # fmt: skip
        except FileNotFoundError:
            if wanted is not None or _has_any(base, fit):
                raise
            continue
        step = json.loads((cluster_directory(base, source) / tag / MANIFEST).read_text())["step"]
        chosen.append((rendezvous.gather("step", step)[0], base, source, tag))
    if not chosen:
        return None
    _, base, source, tag = max(chosen, key=lambda one: one[0])
    return base, source, tag


def _link_again(fit: Fit) -> None:
    """Let a file that came from a remote place have its name in the folder again."""
    tag = fit.resume
    assert tag is not None
    path = tag.with_name(tag.name.removesuffix(SUFFIX))
    if fit.world.rank == 0 and path != tag and not path.exists():
        link(tag / FILE, path)


def _has_any(base: Path, fit: Fit) -> bool:
    own = next(cluster_directory(base, fit.world.cluster_id).glob(f"*/{MANIFEST}"), None)
    return any(fit.world.rendezvous.gather("has a checkpoint", own is not None))


def _require_same_number(fit: Fit) -> None:
    assert fit.resume is not None
    saved = json.loads((fit.resume / MANIFEST).read_text())["num_clusters"]
    if saved != fit.world.num_clusters:
        raise ValueError(
            f"{fit.resume} is of a run of {saved} clusters, and its data was cut for as many: "
            f"some of it would be read twice by {fit.world.num_clusters}, and some never; start as "
            "many clusters, or train on from its weights (load_from_checkpoint)"
        )


def _for_evaluation(path: Any, fit: Fit) -> Any:
    """Return a checkpoint to evaluate: where a script names it, else this cluster's own."""
    if path is None or "://" in str(path) or Path(path).exists():
        return path
    own = own_place(path, fit.world.cluster_id)
    return str(own) if own.exists() else path


def _start(
    original: Callable[..., Any],
    connector: Any,
    checkpoint_path: Any = None,
    weights_only: bool | None = None,
) -> None:
    fit = fit_of(connector.trainer)
    if fit is not None and weights_only is None and is_fitting(connector.trainer):
        weights_only = fit.weights_only  # which Lightning forgets where it restores late
    original(checkpoint_path, **known_to(original, weights_only=weights_only))


def _restore(original: Callable[..., Any], connector: Any) -> None:
    """Restore what the Trainer has, then the outer state."""
    original()
    trainer = connector.trainer
    fit = fit_of(trainer)
    if fit is None or fit.resume is None or not is_fitting(trainer):
        return
    if not has_engine(trainer.strategy):
        fit.require_handle().load(fit.resume)
        fit.watch_weights(trainer.strategy)


def _load_engine(
    original: Callable[..., Any], strategy: Any, checkpoint_path: Any, weights_only: Any = None
) -> Any:
    trainer = strategy.lightning_module.trainer
    fit, path = fit_of(trainer), Path(checkpoint_path)
    is_strict = strategy.lightning_module.strict_loading
    if fit is None or not (path / MANIFEST).is_file():
        return original(checkpoint_path, **known_to(original, weights_only=weights_only))
    engine = strategy.model
    if fit.is_training and is_fitting(trainer):
        _, state = engine.load_checkpoint(
            str(path.parents[1]), tag=fit.resume_tag, load_module_strict=is_strict
        )
        return state
    _, state = engine.load_checkpoint(
        str(path.parent),
        tag=path.name,
        load_optimizer_states=False,
        load_lr_scheduler_states=False,
        load_module_strict=is_strict,
    )
    return state
