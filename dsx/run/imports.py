"""A function that is called once a module has been imported by somebody, and not before.

So nothing is imported that the script does not want, and everything is in place before it goes on.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Follow = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Finds modules as Python does, and lets a function look at each of some once it is there."""

    def __init__(self, follow: Mapping[str, Follow]) -> None:
        self._follow = dict(follow)
        self._asked = ""  # while the other finders are asked

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module that is waited for; None for all others.

        Whoever asks for it may want to know only whether the module is there.
        """
        if fullname not in self._follow or fullname == self._asked:
            return None
        self._asked, asked = fullname, self._asked
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asked = asked
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            follow = self._follow.pop(fullname, None)
            if follow is not None:
                follow(module)

        loader.exec_module = exec_module
        return spec


def after_import(follow: Mapping[str, Follow]) -> None:
    """Call each function with its module once that is imported; at once if it is there already."""
    waiting = {name: act for name, act in follow.items() if name not in sys.modules}
    for name, act in follow.items():
        if name not in waiting:
            act(sys.modules[name])
    sys.meta_path.insert(0, AfterImport(waiting))
