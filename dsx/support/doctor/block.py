"""Whether a "dsx" block can be used, with all that is wrong with it at once.

What is wrong is found as a run finds it, by reading the block; then what the message names is left
out, and the rest is read again.
"""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from dsx.config.axes import AXES
from dsx.config.files import ConfigError, read_json
from dsx.config.flags import block_of_flags, flags_of_variables
from dsx.config.schema import DsxConfig, load_config
from dsx.config.sections import check_clusters
from dsx.plan.model_files import read_words
from dsx.support.doctor.finding import Finding

_MOST = 20
_NAMED = re.compile(r"dsx\.(\w+)(?:\.(\w+))?")


class ReadBlock(NamedTuple):
    """A configuration, None if it cannot be used, and what there is to say of it."""

    config: DsxConfig | None
    findings: list[Finding]


def read_block(source: Path) -> ReadBlock:
    """Read a DeepSpeed JSON, or a file of Megatron's flags; ConfigError if it is neither."""
    variables: list[str] = []
    if source.suffix == ".json":
        document: Mapping[str, Any] = read_json(source)
        try:
            document, variables = _with_variables(document, source)
        except ConfigError as error:
            return ReadBlock(None, [Finding("STOP", "block", str(error))])
    else:
        document = block_of_flags(read_words(source))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            is_file = source.suffix == ".json" and not variables
            config = load_config(source if is_file else document)
            check_clusters(config.clusters)
            config.method.validate(config.clusters.num_clusters)
        except ConfigError as error:
            return ReadBlock(
                None, [Finding("STOP", "block", text) for text in _all(document, error)]
            )
    notes = [Finding("note", "block", str(warning.message)) for warning in caught]
    clusters = config.clusters.num_clusters
    fact = f'{source}: the "dsx" block is valid: {config.preset}, {clusters} clusters'
    if variables:
        fact += f"; as under dsx.run, {', '.join(variables)} of the environment come before it"
    return ReadBlock(config, [Finding("ok", "block", fact), *notes])


def _with_variables(
    document: Mapping[str, Any], source: Path
) -> tuple[Mapping[str, Any], list[str]]:
    """Return a document with DSX_ variables laid over its block, and their names."""
    flags = [f for f in flags_of_variables(os.environ) if not f.startswith("--dsx-config=")]
    block = document.get("dsx")
    if not flags or not isinstance(block, dict):
        return document, []
    laid = block_of_flags(flags, cast("dict[str, Any]", block), str(source))
    names = [flag.partition("=")[0].removeprefix("--").replace("-", "_").upper() for flag in flags]
    return {**document, **laid}, names


def _all(document: Mapping[str, Any], error: ConfigError) -> list[str]:
    """Return the message of each mistake; the first one as a run says it."""
    found = [str(error)]
    left: dict[str, Any] = copy.deepcopy(dict(document))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while len(found) < _MOST and _leave_out(left, found[-1]):
            try:
                check_clusters(load_config(left).clusters)
                break
            except ConfigError as next_error:
                found.append(str(next_error))
    return found


def _leave_out(document: dict[str, Any], message: str) -> bool:
    """Take out of a block, in place, what a message names; return whether that can be done.

    With the name of a choice goes all that is said of it, which nobody could judge then.
    """
    block, named = document.get("dsx"), _NAMED.match(message)
    if not isinstance(block, dict) or named is None:
        return False
    section, key = named.groups()
    if section == "preset":
        is_first = block.get("preset") != "diloco"
        for axis in AXES:
            block.pop(axis, None)
        block["preset"] = "diloco"
        return is_first
    inside: Any = block.get(section)
    if section == "clusters" and key in (None, "num_clusters"):
        block["clusters"] = {**(inside if isinstance(inside, dict) else {}), "num_clusters": 2}
        return inside != block["clusters"]
    if isinstance(inside, dict) and key in inside and not _is_choice(section, key):
        del inside[key]
        return True
    return block.pop(section, None) is not None


def _is_choice(section: str, key: str) -> bool:
    return section in AXES and AXES[section][0] == key
