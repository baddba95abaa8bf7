"""One line makes a choice known, and says what is wrong with one that cannot be."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dsx.cli import app
from dsx.config.schema import ConfigError, preset
from dsx.core import registry
from dsx.method import choices
from dsx.method.choices import AXES, PRESETS, register
from dsx.method.delay.base import Blocking, DelayPolicy
from dsx.method.method import Method
from dsx.method.outer_optimizer import Nesterov

FLAGS = Path(__file__).parents[2] / "configs" / "qwen_107b.flags"


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    known = {kind: dict(names) for kind, names in registry._known.items()}
    monkeypatch.setattr(registry, "_known", known)
    yield


def test_a_name_is_given_or_that_of_the_class_or_function() -> None:
    @register("delay")
    @dataclass(frozen=True)
    class LateMerge(Blocking):
        pass

    @register("delay", "later")
    @dataclass(frozen=True)
    class LaterMerge(Blocking):
        pass

    @register("preset")
    def my_way(num_clusters: int) -> Method:
        return PRESETS["diloco"](num_clusters)

    delays = AXES["delay"].choices
    assert (delays["late_merge"], delays["later"]) == (LateMerge, LaterMerge)
    assert PRESETS["my_way"] is my_way
    assert (delays.of(LateMerge()), delays.of(Blocking())) == ("late_merge", "blocking")
    assert list(delays) == sorted(delays) and len(delays) == 10


@dataclass(frozen=True)
class NoMerge(DelayPolicy):
    steps = 0


@dataclass(frozen=True)
class NoSteps(DelayPolicy):
    def merge(self, view: Any) -> Any:
        return view.anchor


@dataclass(frozen=True)
class Alone:
    """Inherits nothing and says little."""

    steps: int = 0


@dataclass
class Changeable(DelayPolicy):
    steps: int = 0

    def merge(self, view: Any) -> Any:
        return view.anchor


class Plain(Blocking):
    """No dataclass of its own: its fields would not be seen."""


@dataclass(frozen=True)
class Typed(Blocking):
    type: str = "x"


def no_preset() -> Method:
    raise AssertionError


@pytest.mark.parametrize(
    ("axis", "name", "choice", "kind", "said"),
    [
        (
            "delays",
            "x",
            Blocking,
            ValueError,
            r"no such axis; did you mean 'delay'\? Allowed: fr",
        ),
        ("delay", "My-Delay", Blocking, ValueError, r"small letters, digits and underscores"),
        ("delay", "eager", Typed, TypeError, r"has a field 'type', the key that holds the name"),
        ("delay", "x", NoMerge, TypeError, r"NoMerge does not say merge; see .*DelayPolicy"),
        ("delay", "x", NoSteps, TypeError, r"NoSteps does not say steps"),
        ("delay", "x", Alone, TypeError, r"Alone does not say keeps, keeps_current, export"),
        ("delay", "x", Plain, TypeError, r"Plain is no dataclass; put @dataclass\(frozen=True\)"),
        ("delay", "x", Changeable, TypeError, r"Changeable can be changed, and a method must not"),
        ("delay", "x", Nesterov, TypeError, r"Nesterov does not say steps, keeps"),
        ("delay", "x", Blocking(), TypeError, r"stands above a class, not Blocking\(\)"),
        ("delay", "blockade", Blocking, ValueError, r"is registered as 'blocking'; use one name"),
        ("outer_optimizer", "sgd", Nesterov, ValueError, r"outer_optimizer.SGD has this name alre"),
        ("preset", "x", Blocking, TypeError, r"a function of the number of clusters"),
        ("preset", "x", no_preset, TypeError, r"called with the number of clusters, and this"),
    ],
)
def test_what_cannot_be_registered_is_named(
    axis: str, name: str, choice: Any, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        register(axis, name)(choice)
    assert choice is Blocking or choice not in AXES["delay"].choices.values()


def test_a_cell_that_is_run_again_replaces_its_class() -> None:
    def cell() -> type[Any]:
        @register("delay", "mine")
        @dataclass(frozen=True)
        class Mine(Blocking):
            pass

        return Mine

    cell()
    again = cell()
    assert AXES["delay"].choices["mine"] is again


def test_a_choice_without_a_name_is_refused_with_the_line_that_gives_one() -> None:
    @dataclass(frozen=True)
    class Mine(Nesterov):
        pass

    with pytest.raises(ValueError, match=r"put @dsx.register\(.outer_optimizer.\) above the class"):
        AXES["outer_optimizer"].choices.of(Mine(0.1, 0.9))


def test_every_module_that_registers_is_imported_with_the_package() -> None:
    """What another module registers would be known only where that happens to be imported."""
    program = """
import importlib, pkgutil
import dsx.compress, dsx.method
from dsx.core.registry import _known
before = {axis: set(names) for axis, names in _known.items()}
for package in (dsx.compress, dsx.method):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(".native.kernels"):  # a library of C functions, no module
            importlib.import_module(module.name)
assert before == {axis: set(names) for axis, names in _known.items()}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_installed_packages_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[str] = []

    def load() -> None:
        loads.append("mine")
        assert "blocking" in AXES["delay"].choices  # what is loaded may look up names

        @register("delay", "installed")
        @dataclass(frozen=True)
        class Installed(Blocking):
            pass

    entry = SimpleNamespace(name="mine", value="pkg.mine", load=load, dist=None)
    monkeypatch.setattr(choices, "entry_points", lambda group: [entry] * (group == "dsx.methods"))
    monkeypatch.setattr(choices, "_loaded", set())
    assert "installed" in AXES["delay"].choices
    assert "installed" in list(AXES["delay"].choices) and loads == ["mine"]


def test_an_installed_package_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise ModuleNotFoundError("No module named 'gone'")

    dist = SimpleNamespace(name="their-package")
    entry = SimpleNamespace(name="theirs", value="pkg.theirs", load=load, dist=dist)
    monkeypatch.setattr(choices, "entry_points", lambda group: [entry])
    monkeypatch.setattr(choices, "_loaded", set())
    for _ in range(2):  # and not forgotten
        with pytest.raises(ImportError, match=r"their-package offers .*= 'pkg.theirs'.*gone"):
            "blocking" in PRESETS  # noqa: B015
    for command in (["config", "schema"], ["config", "reference"], ["memory", str(FLAGS)]):
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 2 and done.stderr.startswith(f"dsx {command[0]}")
        assert "their-package offers" in done.stderr and done.stderr.count("\n") == 1


def test_an_old_name_stays_that_of_todays_choice() -> None:
    with pytest.raises(ValueError, match="'streaming' had this name before; choose another one"):

        @register("delay", "blend")
        @dataclass(frozen=True)
        class Blend(Blocking):
            pass

    assert "blend" not in AXES["delay"].choices


def test_a_preset_returns_a_method() -> None:
    register("preset", "nothing")(lambda num_clusters: None)
    with pytest.raises(ConfigError, match="dsx.preset='nothing' gives None; a preset has to"):
        preset("nothing")


@pytest.mark.parametrize(("axis", "name"), [(dict, None), (None, None), ("delay", 3)])
def test_axis_and_name_are_strings(axis: Any, name: Any) -> None:
    with pytest.raises(TypeError, match=r"an axis and a name are strings, as in @dsx.register"):
        register(axis, name)
