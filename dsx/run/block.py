"""Where the "dsx" block of a run stands, and what flags and variables change in it.

Looked for in this order: `--dsx-config`, DSX_CONFIG, the JSON files (or JSON texts) among the
script's arguments, ACCELERATE_DEEPSPEED_CONFIG_FILE, which `accelerate launch` sets. If it is in
none of them, the script has it and shows it as soon as it gives its DeepSpeed config to anybody.
A second block that says something else is refused: nobody could tell which one was meant.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from dsx.config.files import ConfigError, read_json, shown
from dsx.config.flags import block_of_file, block_of_flags, flags_of_variables

_ACCELERATE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Block:
    """A "dsx" block as it is written, and where that is."""

    content: Mapping[str, Any]
    place: str
    file: str = ""


class RunBlock:
    """The block of this run: one, once it is known, with the launch's own settings over it."""

    def __init__(
        self, flags: Sequence[str], environ: Mapping[str, str], arguments: Sequence[str]
    ) -> None:
        """Look where a launch shows it; ConfigError for flags that are none, or two blocks."""
        self._flags = [*flags_of_variables(environ), *flags]
        self._found: Block | None = None
        config = [flag for flag in self._flags if flag.startswith("--dsx-config=")]
        self._flags = [flag for flag in self._flags if flag not in config]
        block_of_flags(["--dsx-preset=diloco", "--dsx-num-clusters=1", *self._flags])  # are known
        if config:
            path = config[-1].partition("=")[2]
            self._take(Block(block_of_file("--dsx-config", path), path, path))
        for document, place, file in _documents(arguments):
            self.show(document, place, file)
        file = environ.get(_ACCELERATE)
        if file and Path(file).is_file():
            self.show(read_json(file), f"{_ACCELERATE}={file}", file)

    @property
    def is_known(self) -> bool:
        """Whether there is enough to join."""
        return self._found is not None or any(f.startswith("--dsx-preset=") for f in self._flags)

    def show(self, document: Any, place: str, file: str = "") -> bool:
        """Take the block of a DeepSpeed config, if it has one; return whether the run's is known.

        ConfigError if the run has another one already.
        """
        if isinstance(document, Mapping) and "dsx" in document:
            content = cast("Mapping[str, Any]", document)["dsx"]
            if not isinstance(content, Mapping):
                raise ConfigError(
                    f'{place}: "dsx" must be an object, not {shown(content)}; write '
                    '{"dsx": {"preset": ..., "clusters": {"num_clusters": 2}}}'
                )
            self._take(Block(cast("Mapping[str, Any]", content), place, file))
        return self.is_known

    def resolve(self) -> dict[str, Any]:
        """Return `{"dsx": block}` with everything over it that the launch says."""
        found = self._found or Block({}, "")
        return block_of_flags(self._flags, found.content, found.file)

    def _take(self, block: Block) -> None:
        if self._found is None:
            self._found = block
            logger.info('the "dsx" block is that of %s', block.place)
        elif _plain(self._found.content) != _plain(block.content):
            raise ConfigError(
                f'there are two "dsx" blocks, of {self._found.place} and of {block.place}, which '
                'say different things; take "dsx" out of one of them (a key of it may be a flag: '
                "--dsx-schedule-interval 50)"
            )


def _plain(content: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(content, default=str))


def _documents(arguments: Sequence[str]) -> Iterator[tuple[Any, str, str]]:
    """Yield what JSON files and texts among a script's arguments hold, and where that stands."""
    for argument in arguments:
        text = argument.partition("=")[2] if argument.startswith("--") else argument
        if text.lstrip().startswith("{"):
            yield _parsed(text), "an argument of the script", ""
        elif text.endswith(".json") and Path(text).is_file():
            content = Path(text).read_text(errors="replace")
            document = _parsed(content)
            if document is None and '"dsx"' in content:
                document = read_json(text)  # says what is wrong, and where
            yield document, text, text


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
