"""`dsx export`: the averaged model out of a checkpoint's files, without an engine or model code.

What is exported is what `averaged()` would have held at the save, as the method says: the anchor,
or the mean of the clusters' masters, of the newest tag that is complete in all clusters at hand. If
a cluster is not there the anchor stands in, where there is one. Transfers in flight are left out.

Parameters are put together and written one at a time (weight_files.py), so that a host needs memory
for the largest, in the order of the module's names. What dsx does not train (frozen parameters,
buffers) is cluster 0's, from DeepSpeed's own files; a parameter of two names is written under both.
A tied weight of a pipeline has one name in its module and is written once; the file's metadata
names the places that share it, as `safetensors.torch.save_model` does.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsx.checkpoint.checksums import DAMAGED, find_damage, require_intact
from dsx.checkpoint.files import (
    SavedCluster,
    SavedRank,
    put_together,
    rank_file,
    shard_ranges,
    vector_sources,
)
from dsx.checkpoint.tags import (
    cluster_directory,
    complete_tags,
    newest_first,
    offered,
    require_readable,
    same_content,
)
from dsx.core.types import Slot

logger = logging.getLogger(__name__)
MODULE_FACTS = "dsx_module.json"  # beside the ranks' files: {"aliases": {name: name it shares}}


@dataclass(frozen=True)
class Parameter:
    """A trained parameter, and the vector of which fragment and ranks it lies in."""

    name: str
    shape: tuple[int, ...]
    fragment: int
    ranks: Sequence[Sequence[SavedRank]]  # by cluster
    vector: str


class SavedModel:
    """The averaged model in the files of a tag; tensors are put together when asked for."""

    def __init__(self, directories: Sequence[Path]) -> None:
        self.directory = directories[0]
        self.directories = directories
        for directory in directories:
            require_intact(directory)
        clusters = [SavedCluster(directory) for directory in directories]
        self.num_saved_clusters = clusters[0].num_clusters
        ranks = [cluster.ranks() for cluster in clusters]
        kinds = ranks[0][0].meta["kinds"]
        self.step: int = ranks[0][0].meta["step"]
        self.session: str = ranks[0][0].meta["session"]  # the start of the run that saved it
        self.is_partial = len(directories) < self.num_saved_clusters
        self.is_mean: bool = kinds["exports"] == "mean"
        if self.is_partial and kinds["keeps an anchor"]:
            self.is_mean = False
        self.is_second_best = not self.is_mean and kinds["exports"] == "mean"
        self.in_flight = sum(not entry["is_empty"] for entry in ranks[0][0].meta["in_flight"])
        if self.is_mean and self.is_partial:
            raise ValueError(
                f"this method keeps no anchor, so its model is the mean of "
                f"{self.num_saved_clusters} clusters, and {self.directory.parents[1]} holds "
                f"{len(directories)}: copy the directories of all clusters there"
            )
        self.stages = sorted({rank.meta["kinds"]["stage"][0] for rank in ranks[0]})
        self.parameters = self._find(ranks if self.is_mean else ranks[:1])
        path = self.directory / MODULE_FACTS
        facts = json.loads(path.read_text()) if path.is_file() else {}
        self.aliases: Mapping[str, str] = facts.get("aliases", {})
        self.buffers: Sequence[str] | None = facts.get("buffers")  # None: not noted
        self.places: Mapping[str, str] = facts.get("places", {})
        self._tied: Mapping[str, Any] = facts.get("tied", {})

    def name_at(self, place: str, name: str) -> str:
        """Return the model's name of a tensor of the layer at a place in a pipeline."""
        if place not in self.places:
            return f"{place}.{name}"
        shared = f"{_tied_layer(self.places[place])}.{name}"
        return shared if shared in self._tied else f"{self.places[place]}.{name}"

    @property
    def copies(self) -> dict[str, str]:
        """The names that tied weights have at their places, each with the one it is under."""
        return {
            f"{place}.{name.removeprefix(_tied_layer(layer) + '.')}": name
            for place, layer in self.places.items()
            for name in self._tied
            if name.startswith(f"{_tied_layer(layer)}.") and name in self.parameters
        }

    @property
    def numel(self) -> int:
        """Trained elements."""
        return sum(math.prod(p.shape) for p in self.parameters.values())

    def tensor(self, name: str) -> Tensor:
        """Return one averaged parameter, fp32; ValueError if part of it is not in the files."""
        parameter = self.parameters[name]
        total = self._of_cluster(parameter, 0)
        for cluster in range(1, len(parameter.ranks)):
            total += self._of_cluster(parameter, cluster)
        return total.div_(len(parameter.ranks)).view(parameter.shape)

    def _of_cluster(self, parameter: Parameter, cluster: int) -> Tensor:
        numel, ranks = math.prod(parameter.shape), parameter.ranks[cluster]
        sources = vector_sources(ranks, "layout", parameter.fragment, parameter.vector)
        out = torch.empty(numel)
        missing = put_together(shard_ranges([Slot(parameter.name, (numel,), 0)]), out, sources)
        if missing:
            raise ValueError(
                f"{ranks[0].path.parent} lacks {missing} of {numel} elements of {parameter.name}"
            )
        return out

    def _find(self, ranks: Sequence[Sequence[SavedRank]]) -> dict[str, Parameter]:
        """Return the parameters of all pipeline stages by name."""
        found: dict[str, Parameter] = {}
        for stage in self.stages:
            mine = [[r for r in rs if r.meta["kinds"]["stage"][0] == stage] for rs in ranks]
            for index, parameters in enumerate(mine[0][0].meta["kinds"]["parameters"]):
                vector = f"{'local' if self.is_mean else 'anchor'}/{index}"
                for name, shape in parameters:
                    found[name] = Parameter(name, tuple(shape), index, mine, vector)
        return found


def _tied_layer(place: str) -> str:
    """Return the name of a tied layer in its module, whatever the stage."""
    return place[place.index("tied_modules.") :]


def find_model(base: Path, tag: str | None) -> SavedModel:
    """Return the averaged model of a checkpoints' directory; FileNotFoundError says what is there.

    `base` is what was given to `save_checkpoint`: it holds cluster_0, cluster_1, ...
    """
    found = sorted(
        int(path.name.removeprefix("cluster_"))
        for path in base.glob("cluster_*")
        if path.name.removeprefix("cluster_").isdecimal()
    )
    if not found:
        raise FileNotFoundError(
            f"{base} holds no cluster_<m>: give the directory that save_checkpoint was given, "
            "e.g. runs/quickstart/checkpoints"
        )
    tables = {m: complete_tags(cluster_directory(base, m)) for m in found}
    skipped: list[str] = []
    for m, table in tables.items():
        if tag is not None:
            require_readable(table, tag)
        damaged = (one[DAMAGED] for one in table.values() if DAMAGED in one)
        skipped += [f"cluster {m}: {why}" for why in damaged]
    reach = [[table, {}] for table in tables.values()]
    for name, manifest in newest_first(offered(reach), tag):
        trained = manifest.get("members") or range(manifest["num_clusters"])
        members = [m for m in found if m in trained]  # others are of another run
        held = [(m, same_content(tables[m], name, manifest)) for m in members]
        lacking = [m for m, same in held if same is None]
        if lacking:
            skipped.append(f"{name} is not complete in cluster(s) {lacking}")
            continue
        places = [cluster_directory(base, m) / str(same) for m, same in held]
        told = [tables[m][str(same)].get("trouble") for m, same in held]
        wrong = next(filter(None, (*told, *map(find_damage, places))), "") if tag is None else ""
        if wrong:
            skipped.append(f"{name}: {wrong}")
            continue
        for line in skipped:
            logger.warning("%s; exporting %s", line, name)
        return SavedModel(places)
    there = "; ".join(f"cluster {m}: {sorted(table) or 'none'}" for m, table in tables.items())
    what = f"checkpoint {tag!r}" if tag else "checkpoint"
    why = "".join(f"; {line}" for line in skipped)
    raise FileNotFoundError(
        f"no complete {what} that all clusters hold under {base} from one run ({there}){why}"
    )


def bare_model(directory: Path) -> SavedModel:
    """Return the averaged model of what `handle.save` has written into a directory, of one cluster.

    Those of the other clusters are taken, too, where it is <base>/cluster_<m>/<name> and they are
    of the same step of the same run.
    """
    own = SavedRank(rank_file(directory, 0)).meta
    found = [directory]
    if directory.parent.name.startswith("cluster_"):
        base = directory.parents[1]
        clusters = [
            cluster_directory(base, m) / directory.name
            for m in own.get("members", range(own["rank_info"]["num_clusters"]))
        ]
        found = [path for path in clusters if path == directory or _is_of(path, own)]
    return SavedModel(found)


def _is_of(directory: Path, own: Mapping[str, Any]) -> bool:
    """Whether a directory holds an outer state of the same run and step."""
    path = rank_file(directory, 0)
    if not path.is_file():
        return False
    other = SavedRank(path).meta
    return all(other[key] == own[key] for key in ("session", "step", "engine_holds"))
