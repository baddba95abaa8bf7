"""The "dsx" block as command-line flags, for scripts whose settings are flags (Megatron's).

One flag for every key: `--dsx-preset`, `--dsx-schedule-interval` for `schedule.interval`,
`--dsx-metrics-dir`; the keys of `clusters` without their section, `--dsx-num-clusters`. A value is
read as JSON, else as text, and checked where the block is: there is one schema. `--dsx-config FILE`
gives a JSON whose "dsx" block the flags override.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast, get_args, get_origin, get_type_hints

from pydantic import BaseModel

from dsx.config.checkpoints import CheckpointsConfig
from dsx.config.divergence import DivergenceConfig
from dsx.config.files import ConfigError, read_json, shown
from dsx.config.metrics import MetricsConfig
from dsx.config.planned import PlanConfig, beside
from dsx.config.renames import with_new_names
from dsx.config.schema import DsxConfig
from dsx.config.sections import (
    ClustersConfig,
    CodingConfig,
    GuardConfig,
    LinkConfig,
    StateConfig,
)
from dsx.core.renamed import COMMAND_LINE
from dsx.method.choices import AXES, PRESETS

_PREFIX = "--dsx-"
_VARIABLE, _OF_TESTS = "DSX_", "DSX_WRITE_"
_SECTIONS: dict[str, type[BaseModel]] = {
    "clusters": ClustersConfig,
    "metrics": MetricsConfig,
    "state": StateConfig,
    "coding": CodingConfig,
    "link": LinkConfig,
    "checkpoints": CheckpointsConfig,
    "divergence": DivergenceConfig,
    "guard": GuardConfig,
    "plan": PlanConfig,
}


@dataclass(frozen=True)
class Flag:
    """One flag and the key it stands for; `section` is empty for keys of the block itself."""

    name: str
    section: str
    key: str
    help: str
    is_list: bool = False
    is_text: bool = False
    is_one: bool = False  # or one value, as another choice on the axis has it

    @property
    def attribute(self) -> str:
        """Return the name in an argparse namespace."""
        return self.name.removeprefix("--").replace("-", "_")


def all_flags() -> Iterator[Flag]:
    """Yield a flag for every key that a "dsx" block may have."""
    yield Flag("--dsx-config", "", "config", 'JSON file with a "dsx" block, which flags override')
    yield Flag("--dsx-preset", "", "preset", ", ".join(PRESETS))
    for section, model in _SECTIONS.items():
        for key, field in model.model_fields.items():
            words = [key] if section == "clusters" else [section, key]
            of_key = field.annotation
            text = f"dsx.{section}.{key}"
            yield Flag(_flag(*words), section, key, text, _is_list(of_key), _is_text(of_key))
    for axis, (selector, choices) in AXES.items():
        yield Flag(_flag(axis, selector), axis, selector, ", ".join(choices))
        of: dict[str, list[str]] = {}
        kinds: dict[str, list[Any]] = {}
        for name, kind in choices.items():
            hints = _hints(kind)
            for field in dataclasses.fields(kind):
                of.setdefault(field.name, []).append(name)
                kinds.setdefault(field.name, []).append(hints[field.name])
        for key, names in of.items():
            text = f"of dsx.{axis}.{selector}: {', '.join(names)}"
            are_lists, is_text = [*map(_is_list, kinds[key])], all(map(_is_text, kinds[key]))
            is_one = not all(are_lists)
            yield Flag(_flag(axis, key), axis, key, text, any(are_lists), is_text, is_one)


@lru_cache(maxsize=128)
def _hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


def _is_list(annotation: Any) -> bool:
    return annotation is tuple or any(get_origin(one) is tuple for one in _parts(annotation))


def _is_text(annotation: Any) -> bool:
    """Return whether what is given there, or in a list there, is text whatever it looks like."""
    ends = [one for one in _parts(annotation) if not get_args(one)]
    return any(one is str or isinstance(one, str) for one in ends) and not any(
        one in (int, float, bool) or isinstance(one, int) for one in ends
    )


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for one in get_args(annotation):
        yield from _parts(one)


def add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add every flag to a parser, in a group of their own; values stay as they are written."""
    group = parser.add_argument_group("dsx", "training across clusters; the keys of a dsx block")
    for flag in all_flags():
        metavar = "FILE" if flag.key == "config" else flag.key.upper()
        group.add_argument(flag.name, metavar=metavar, help=flag.help.replace("%", "%%"))
    return parser


def add_launch_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the arguments of dsx that differ from launcher to launcher, without DeepSpeed's."""
    add = parser.add_argument_group("dsx", "one launcher per cluster: which one, where to meet")
    add.add_argument("--dsx-cluster-id", type=int, metavar="M", help="0..num_clusters-1")
    add.add_argument("--dsx-rendezvous", metavar="tcp://HOST:PORT", help="where clusters meet")
    add.add_argument("--dsx-store", help="cluster_0, or standalone for `dsx rendezvous`")
    add.add_argument("--dsx-interface", help="network interface towards the other clusters")
    add.add_argument("--dsx-link-security", help="curve, or none where nobody else is on the line")
    return parser


def block_of_flags(
    arguments: Sequence[str], base: Mapping[str, Any] | None = None, file: str = ""
) -> dict[str, Any]:
    """Return `{"dsx": block}` of the flags among `arguments`; ConfigError for one not known.

    All other arguments are left to whoever they are for. With `base`, a block that stands in
    `file`, the flags override that one, and there may be none.
    """
    known = [flag.name for flag in all_flags()]
    for argument in arguments:
        name = argument.partition("=")[0]
        if name.startswith(_PREFIX) and name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "see --help for all of them"
            raise ConfigError(f"{name} is not a flag of dsx; {hint}")
    parser = add_flags(_Parser(allow_abbrev=False, add_help=False))
    block = json.loads(json.dumps(base or {}))
    _rename(block, file)
    return _block_of_namespace(parser.parse_known_args(list(arguments))[0], block)


def block_of_file(option: str, path: str) -> dict[str, Any]:
    """Return the "dsx" block of a file that an option names; ConfigError if it has none."""
    document = read_json(path)
    if not isinstance(document.get("dsx"), dict):
        raise ConfigError(
            f'{option} {path}: the file has no "dsx" block; add {{"dsx": {{"preset": ...}}}}'
        )
    return beside(json.loads(json.dumps(document["dsx"])), Path(path))


def flags_of_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the flags that DSX_ variables stand for; ConfigError for one that stands for none."""
    names = {_variable(flag.name): flag.name for flag in all_flags()}
    flags: list[str] = []
    for name, value in environ.items():
        if not name.startswith(_VARIABLE) or name.startswith(_OF_TESTS):
            continue
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else "each flag has one: DSX_NUM_CLUSTERS=2"
            raise ConfigError(f"{name} in the environment is not a variable of dsx; {hint}")
        flags.append(f"{names[name]}={value}")
    return flags


def _variable(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_").upper()


class _Parser(argparse.ArgumentParser):
    """One whose mistakes are those of a configuration."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; give each --dsx flag its value, as --dsx-preset diloco")


def _block_of_namespace(namespace: argparse.Namespace, block: dict[str, Any]) -> dict[str, Any]:
    given = {flag: getattr(namespace, flag.attribute, None) for flag in all_flags()}
    texts = {flag: text for flag, text in given.items() if text is not None}
    for flag, text in texts.items():
        if flag.key == "config":
            block = block_of_file("--dsx-config", text)
            _rename(block, text)
    for flag, text in texts.items():
        if flag.section:
            section = block.setdefault(flag.section, {})
            if not isinstance(section, dict):
                raise ConfigError(
                    f"dsx.{flag.section} must be an object, not {shown(section)}; leave it out of "
                    f"--dsx-config, as {flag.name} says it"
                )
            section[flag.key] = _value(flag, text)
        elif flag.key == "preset":
            block["preset"] = text
    _rename(block, COMMAND_LINE)
    if "preset" not in block:
        raise ConfigError(f"--dsx-preset is missing; choose one of {', '.join(PRESETS)}")
    clusters = block.get("clusters", {})  # what is no object is refused with the block
    if isinstance(clusters, dict) and "num_clusters" not in clusters:
        raise ConfigError(
            "--dsx-num-clusters is missing, the number of clusters in this run; add "
            "--dsx-num-clusters 2"
        )
    return {"dsx": block}


def _rename(block: dict[str, Any], file: str) -> None:
    """Give choices today's names, in place, while it is known where they were written."""
    for axis in AXES:
        if isinstance(block.get(axis), dict):  # what is no object is refused with the block
            block[axis] = with_new_names(axis, block[axis], file)


def show_resolved(namespace: argparse.Namespace, config: DsxConfig) -> None:
    """Set every flag to what is in force, the preset's values included, so that dumps tell."""
    sections: dict[str, Any] = {
        "": {"preset": config.preset, "config": getattr(namespace, "dsx_config", None)},
        "clusters": config.clusters.model_dump(mode="json"),
        "metrics": config.metrics.model_dump(mode="json"),
        "state": config.state.model_dump(),
        "coding": config.coding.model_dump(),
        "link": config.link.model_dump(),
        "checkpoints": config.checkpoints.model_dump(),
        "divergence": config.divergence.model_dump(),
        "guard": config.guard.model_dump(),
        "plan": config.plan.model_dump(),
        **config.axes,
    }
    for flag in all_flags():
        setattr(namespace, flag.attribute, sections[flag.section].get(flag.key))


def _flag(*words: str) -> str:
    return _PREFIX + "-".join(words).replace("_", "-")


def _value(flag: Flag, text: str) -> Any:
    if flag.is_list and ("," in text or not flag.is_one):
        whole = _scalar(text)
        if isinstance(whole, list):
            return cast("list[Any]", whole)
        return [_scalar(part.strip(), flag.is_text) for part in text.split(",")]
    if flag.key == "rendezvous" and "://" not in text:
        return f"tcp://{text}"
    return _scalar(text, flag.is_text)


def _scalar(text: str, is_text: bool = False) -> Any:
    """Return a value as JSON has it, else the text: `20261122` is a folder where one is meant."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return found if not is_text or found is None or isinstance(found, str) else text
