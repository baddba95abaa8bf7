"""What must be equal between clusters, compared before any of them trains.

Facts have to be equal, or the clusters cannot work together. Settings (rates, clipping, a
tokenizer) should be: where they differ, each cluster trains something else, in silence. One that is
meant to differ stands in `clusters.may_differ`, by its name or that of what it is a part of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from dsx.checkpoint.files import first_difference, layout
from dsx.comm.rendezvous import Rendezvous
from dsx.comm.versions import NAMES as VERSIONS
from dsx.config.files import ConfigError
from dsx.core.checks import nearest
from dsx.core.engine import EngineAdapter


def layout_of(adapter: EngineAdapter) -> dict[str, Any]:
    """Return what each rank has in common with its counterparts: fragments, types of parameters."""
    parameters = [p for of_fragment in adapter.fragment_parameters for p in of_fragment]
    dtypes = {parameter.name: parameter.dtype for parameter in parameters}
    return {"fragments": layout(adapter.fragments), "dtypes": dtypes}


def require_alike(
    rendezvous: Rendezvous,
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    may_differ: Sequence[str],
) -> None:
    """Compare plain values with the ranks of this number in all clusters, which all call it.

    ValueError names the first difference, with both values; ConfigError a name in `may_differ` that
    is not among the settings of any cluster.
    """
    ours = {"facts": dict(facts), "settings": dict(settings)}
    everyone = rendezvous.compare("layout", ours)
    for cluster, other in enumerate(everyone):
        difference = first_difference(everyone[0]["facts"], other["facts"])
        if difference:
            raise ValueError(
                f"clusters do not match at {_both(difference, cluster)}; give all clusters the "
                "same model and the same configuration"
            )
    _refuse_unknown(may_differ, [other["settings"] for other in everyone])
    compared = [without(other["settings"], may_differ) for other in everyone]
    for cluster, other in enumerate(compared):
        difference = first_difference(compared[0], other)
        if difference:
            raise ValueError(
                f"clusters train differently: {_both(difference, cluster)}; give all clusters the "
                f"same, or, if it is meant, name {difference[0]!r} in clusters.may_differ"
            )


def without(value: Any, names: Sequence[str], path: str = "") -> Any:
    """Return plain values without the entries of these names, whatever is below them included."""
    if isinstance(value, Mapping):
        entries = cast(Mapping[str, Any], value).items()
        below = {key: f"{path}.{key}".lstrip(".") for key, _ in entries}
        kept = {key: entry for key, entry in entries if below[key] not in names}
        return {key: without(entry, names, below[key]) for key, entry in kept.items()}
    if isinstance(value, list):  # a hole keeps the places of the others
        entries = cast("list[Any]", value)
        below = [f"{path}[{index}]" for index in range(len(entries))]
        return [
            None if name in names else without(entry, names, name)
            for name, entry in zip(below, entries, strict=True)
        ]
    return value


def _both(difference: tuple[str, Any, Any], cluster: int) -> str:
    where, first, other = difference
    return f"{where}: cluster 0 has {first}, cluster {cluster} has {other}"


def _refuse_unknown(may_differ: Sequence[str], everyone: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for the first name that stands for nothing compared."""
    known = {name for settings in everyone for name in _names(settings)} | set(VERSIONS)
    for name in may_differ:
        if name not in known:
            short = sorted({re.sub(r"\[\d+\]", "", name) for name in known})
            shown = [one for one in short if one.count(".") < 2]
            raise ConfigError(
                f"dsx.clusters.may_differ names {name!r}, which is not compared"
                f"{nearest(name, shown)}"
            )


def _names(value: Any, path: str = "") -> Iterator[str]:
    """Yield the names of all entries, of those that hold others, too."""
    if path:
        yield path
    if isinstance(value, Mapping):
        for key, entry in cast(Mapping[str, Any], value).items():
            yield from _names(entry, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, entry in enumerate(cast("list[Any]", value)):
            yield from _names(entry, f"{path}[{index}]")


def require_number_of_clusters(configured: int, joined: int) -> None:
    """Raise ValueError where a handle's configuration is not that of the world it is in."""
    if configured != joined:
        raise ValueError(
            f"clusters.num_clusters={configured}, but this process is one of {joined} clusters: "
            "init_distributed was given another configuration"
        )
