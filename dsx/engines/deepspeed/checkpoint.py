"""`engine.save_checkpoint` and `engine.load_checkpoint`, extended by the outer state.

Each cluster has its own directory, `<save_dir>/cluster_<m>/<tag>/`: every cluster has a rank 0,
and they must not overwrite each other's files. The outer state is written beside DeepSpeed's
files, and the directory gets its name once all of them are there (tags.py). Without a tag, loading
takes the newest good one that all clusters hold (choice.py), so a cluster that died while saving
does not split the run. After `finish()` DeepSpeed's files hold the averaged model; a cluster that
goes on from them takes its own weights back.

DeepSpeed (0.19) brings its own part to another number of ranks, or from ZeRO-1 to 2 and back, by
its universal checkpoint, made with its `ds_to_universal` as `<tag>_universal` and loaded where the
JSON says `"checkpoint": {"load_universal": true}`; the outer state is then still taken from
`<tag>`. Where it refuses (between ZeRO-3, 1 or 2, and 0), so do we, with its error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dsx.checkpoint.averaged_model import MODULE_FACTS
from dsx.checkpoint.files import SavedCluster
from dsx.checkpoint.health import tensors_of
from dsx.checkpoint.pipeline_repartition import is_cut_anew, own_cut, saved_cut
from dsx.checkpoint.tags import (
    cluster_directory,
    complete_tag,
    write_durably,
)
from dsx.comm.world import World
from dsx.engines.agreed_save import AgreedSave, survives
from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.deepspeed.full_disk import failing_together
from dsx.engines.deepspeed.parameters import stepping_optimizer
from dsx.engines.deepspeed.pickles import find_code
from dsx.engines.deepspeed.pipeline import (
    OF_STAGE,
    describe_layers,
    mark_replicas,
    name_in_model,
)
from dsx.engines.deepspeed.preemption import EndOfEngine
from dsx.engines.deepspeed.synchronous import (
    UNIVERSAL,
    begin_from,
    find_plain,
    plain_beside,
    read_facts,
    require_loadable,
)
from dsx.engines.resume_point import choose
from dsx.training.handle import Handle
from dsx.training.manifest import manifest_of

logger = logging.getLogger(__name__)


def carry_outer_state(engine: Any, handle: Handle, world: World, end: EndOfEngine) -> None:
    """Replace the engine's two checkpoint methods by ones that carry the outer state, too."""
    save = end.write = _saving(engine, handle, world, end)

    def save_and_go_on(*args: Any, **kwargs: Any) -> bool:
        return survives(lambda: save(*args, **kwargs))

    engine.save_checkpoint = save_and_go_on
    engine.load_checkpoint = handle.rollback.load = _loading(engine, handle, world)


def _saving(engine: Any, handle: Handle, world: World, end: EndOfEngine) -> Any:
    save_checkpoint = engine.save_checkpoint

    def save(
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> None:
        """Save as DeepSpeed does, into this cluster's directory, with the outer state."""
        tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
        directory = cluster_directory(save_dir, world.cluster_id)
        with handle.saving():
            saving = AgreedSave(handle, directory, tag, world.rank == 0, may_be_later=True)
            begun, excludes = saving.unfinished, exclude_frozen_parameters
            of_script = saving.of_script(lambda: end.script_state(begun, client_state))
            state = {**mark_replicas(engine), **of_script}
            with failing_together(engine, saving):
                save_checkpoint(str(directory), begun.name, state, False, excludes)
            arguments = save_dir, tag, client_state, save_latest, excludes
            saving.do(lambda: handle.write(begun, lambda: survives(lambda: save(*arguments))))
            _complete(engine, handle, world, saving, save_latest)

    return save


def _loading(engine: Any, handle: Handle, world: World) -> Any:
    load_checkpoint = engine.load_checkpoint

    def load(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> Any:
        """Load as DeepSpeed does, from this cluster's directory, with the outer state.

        Where there is none, but a checkpoint of plain DeepSpeed, the run begins from that.
        """
        _require_everything(load_optimizer_states and not load_module_only)
        handle.beside.wait_together()  # what is being written may be what is to be loaded
        if handle.joining.is_due:  # what the others hold is newer than any checkpoint
            handle.joining.look_in(load_dir, tag)
            handle.settle()
            return None, {}
        takes_schedule = load_lr_scheduler_states

        def load_engine(directory: Path, own_tag: str, num_ranks: int) -> Any:
            _require_no_code(handle, world, directory.parent / own_tag)
            with _hinting_at_universal(num_ranks, directory, world):
                result = load_checkpoint(
                    str(directory.parent), own_tag, load_module_strict, True, takes_schedule, False,
                    custom_load_fn,
                )  # fmt: skip
            result[1].pop("universal_checkpoint_info", None)
            return result

        is_going_back = handle.only_before is not None
        plain = None if is_going_back else find_plain(handle, world, load_dir, tag)
        if plain is not None:
            own_tag = _engine_tag(engine, plain.parent, plain.name)
            facts = read_facts(plain, own_tag)
            require_loadable(engine, handle, facts, takes_schedule)
            result = load_engine(plain, own_tag, facts.num_ranks)
            begin_from(engine, handle, facts, takes_schedule)
            return result
        source, tag = _choose(handle, world, load_dir, tag)
        directory = cluster_directory(load_dir, source)
        saved = SavedCluster(directory / tag)
        is_repartitioned = _is_cut_anew(engine, handle, saved)
        own_tag = _engine_tag(engine, directory, tag)
        result = load_engine(directory / tag, own_tag, saved.num_ranks)
        is_new, is_other = source != world.cluster_id, saved.num_clusters != world.num_clusters
        handle.load(directory / tag, is_new, is_other, is_repartitioned)
        if own_tag != tag:  # weights that ZeRO-3 keeps gathered are of before
            handle.loop.adapter.sync_model_weights()
        return result

    return load


def _choose(handle: Handle, world: World, base: str, wanted: str | None) -> tuple[int, str]:
    """Return what all clusters load of dsx's own; the error names what else there is."""
    try:
        return choose(handle.gather, world, base, wanted, handle.only_before, remote=handle.remote)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}{plain_beside(base)}") from None


def _require_everything(is_wanted: bool) -> None:
    if not is_wanted:
        raise ValueError(
            "load_checkpoint without optimizer states leaves the masters and the anchor apart; "
            "load the weights into the model before dsx.initialize instead"
        )


def _complete(
    engine: Any, handle: Handle, world: World, saving: AgreedSave, is_latest: bool
) -> None:
    """Write what belongs to all ranks, and give the tag its name. Collective in the cluster."""
    facts = json.dumps(_describe_module(engine))  # returns once all ranks have saved
    judged = gather_objects(handle.rollback.judge(tensors_of([stepping_optimizer(engine)])))
    directory, tag = saving.final.parent, saving.final.name
    manifest = manifest_of(handle, world, judged)

    def finish() -> None:
        write_durably(saving.unfinished / MODULE_FACTS, facts)
        complete_tag(directory, tag, manifest)
        if is_latest:
            write_durably(directory / "latest", tag)

    saving.complete(finish)


def _describe_module(engine: Any) -> dict[str, Any]:
    """Return what `dsx export` must know of the module. Collective: nobody returns before all."""
    buffers = sorted(name_in_model(engine, dict(engine.module.named_buffers())))
    everyone = gather_objects((_aliases(engine.module), buffers))
    return {
        "aliases": {name: first for aliases, _ in everyone for name, first in aliases.items()},
        "buffers": sorted({name for _, names in everyone for name in names}),
        "zero_stage": engine.zero_optimization_stage(),
        **describe_layers(engine),
    }


def _is_cut_anew(engine: Any, handle: Handle, saved: SavedCluster) -> bool:
    """Whether a pipeline has other stages than when it was saved. Collective in the cluster.

    ValueError for what DeepSpeed would load wrongly, or on some stages only.
    """
    if not engine.pipeline_parallelism:
        return False
    stages = gather_objects(own_cut(handle.loop))
    ours = {name: rank_info for stage in stages for name, rank_info in stage.items()}
    is_repartitioned = is_cut_anew(saved, saved_cut(saved), ours)
    zero_stage = json.loads((saved.directory / MODULE_FACTS).read_text())["zero_stage"]
    if zero_stage != engine.zero_optimization_stage():
        raise ValueError(
            f"{saved.directory} was saved by a pipeline with ZeRO-{zero_stage}, and this one "
            f"has zero_optimization.stage={engine.zero_optimization_stage()}: DeepSpeed converts "
            "nothing between them; keep the stage, or export the model (dsx export) and start "
            "from it"
        )
    own = [name for name in ours if name.startswith(OF_STAGE)]
    if own and engine.load_universal_checkpoint():
        raise ValueError(
            f"DeepSpeed's universal checkpoint has one place for {own[0]} and for that of the "
            f"first stage: this pipeline goes on with the layout that saved {saved.directory}, "
            "without checkpoint.load_universal"
        )
    if is_repartitioned and not engine.load_universal_checkpoint():
        advice = "resume with the same stages, or export the model (dsx export) and start from it"
        is_convertible = not engine.has_moe_layers  # its converter does not know experts
        if is_convertible and any(saved.directory.glob("*zero_*_optim_states.pt")):
            advice = (
                f"convert it in every cluster: {_conversion(saved.directory)} and set "
                '"checkpoint": {"load_universal": true}'
            )
        raise ValueError(
            f"{saved.directory} was saved with other pipeline stages, by which DeepSpeed keeps "
            f"the optimizer's states; {advice}"
        )
    return is_repartitioned


def _require_no_code(handle: Handle, world: World, directory: Path) -> None:
    """Refuse, in every cluster, what DeepSpeed would run on reading it. Collective over all."""
    files = sorted(directory.rglob("*.pt"))[world.rank :: world.world_size]
    everyone = gather_objects(find_code(files))
    found = next((trouble for trouble in everyone if trouble), None)
    for cluster, trouble in enumerate(handle.gather(found)):
        if trouble:
            raise ValueError(f"cluster {cluster}: {trouble}")


def _aliases(module: Any) -> dict[str, str]:
    """Return the further names of parameters that have several, with the first one."""
    first: dict[int, str] = {}
    names = module.named_parameters(remove_duplicate=False)
    return {n: first[id(p)] for n, p in names if first.setdefault(id(p), n) != n}


def _engine_tag(engine: Any, directory: Path, tag: str) -> str:
    """Return the tag that DeepSpeed loads, its universal checkpoint if the JSON says so."""
    if not engine.load_universal_checkpoint():
        return tag
    if not (directory / f"{tag}{UNIVERSAL}").is_dir():
        raise FileNotFoundError(
            f"checkpoint.load_universal is set, and there is no {directory / tag}{UNIVERSAL}: make "
            f"it from {directory / tag} with: {_conversion(directory / tag)}"
        )
    if engine.zero_optimization_stage() == 3 and len(engine.basic_optimizer.param_groups) > 1:
        logger.warning(
            "DeepSpeed's ZeRO-3 gives all parameter groups the settings of the first one when it "
            "loads a universal checkpoint: set learning rates and weight decay again"
        )
    return f"{tag}{UNIVERSAL}"


@contextmanager
def _hinting_at_universal(
    num_ranks: int, directory: Path, world: World
) -> Generator[None, None, None]:
    """Say, where DeepSpeed refuses what it has saved in another layout, what to do about it."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    kinds = (RuntimeError, AssertionError, KeyError, IndexError, ValueError, OSError)
    try:
        yield
    except (*kinds, ZeRORuntimeException) as error:
        raise RuntimeError(
            f"DeepSpeed does not load {directory} (saved by {num_ranks} ranks, now "
            f"{world.world_size}): {type(error).__name__}: {error}. For another number of "
            "ranks, or ZeRO-2 in place of 1 or 1 of 2, convert it in every cluster: "
            f"{_conversion(directory)} and set "
            '"checkpoint": {"load_universal": true}; between ZeRO-3, 1 or 2, and 0 DeepSpeed '
            "converts nothing: export the model (dsx export) and start from it"
        ) from error


def _conversion(directory: Path) -> str:
    """Return the command that makes DeepSpeed's universal checkpoint of a tag."""
    return (
        f"python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
        f"{directory} --output_folder {directory}{UNIVERSAL}"
    )
