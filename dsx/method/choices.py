"""What a method may be made of: the choices on each axis and the presets, by name.

What ships is registered by the modules that the package imports. What is installed beside dsx is
found by the entry-point group "dsx.methods", whose modules are imported when names are first
looked up:

    [project.entry-points."dsx.methods"]
    mine = "my_package.my_method"
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from dsx.core.registry import PRESET, SELECTORS, Names, register
from dsx.method.method import Method

__all__ = ["AXES", "GROUP", "PRESETS", "Axis", "register"]

GROUP = "dsx.methods"
_loaded: set[str] = set()


class InstalledMethodError(ImportError, ValueError):
    """What an installed package offers cannot be imported: one line at the end of a command."""


class Axis(NamedTuple):
    """The key of a configuration that selects a choice, and the choices by name."""

    selector: str
    choices: Names[type[Any]]


def load_installed() -> None:
    """Import what installed packages offer in the group "dsx.methods", each once per process.

    Raises InstalledMethodError, naming package and entry point, if one of them cannot be imported.
    """
    if GROUP in _loaded:
        return
    _loaded.add(GROUP)  # first: what is imported may look up names itself
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
        except Exception as error:  # whatever a package of somebody else's raises when imported
            _loaded.discard(GROUP)
            package = entry.dist.name if entry.dist else "an installed package"
            raise InstalledMethodError(
                f"{package} offers methods to dsx by the entry point {entry.name} = "
                f"{entry.value!r}, which fails with {type(error).__name__}: {error}; mend or "
                "uninstall it"
            ) from error


AXES: Mapping[str, Axis] = {
    axis: Axis(selector, Names(axis, load_installed)) for axis, selector in SELECTORS.items()
}
PRESETS: Names[Callable[[int], Method]] = Names(PRESET, load_installed)


def preset_method(name: str, num_clusters: int) -> Method:
    """Return what a preset makes; ValueError, naming it, if it fails or makes something else."""
    try:
        made = PRESETS[name](num_clusters)
    except Exception as error:  # whatever a function of somebody else's raises
        raise ValueError(f"preset={name!r} fails with {type(error).__name__}: {error}") from error
    if not isinstance(made, Method):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"preset={name!r} gives {made!r}; a preset has to return a Method")
    return made
