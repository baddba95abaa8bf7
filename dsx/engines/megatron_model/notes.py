"""What a Megatron run notes of its model, beside the outer state: `dsx_megatron.json`.

Plain JSON with a format number, so that the model can be put together and named without Megatron:
how every weight is cut among tensor-parallel ranks, which experts each expert-parallel rank holds,
the settings of its TransformerConfig, and what a GPTModel was given beside them. A file of another
format is refused by its number. Format 1 is read, too: it says nothing of experts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NOTES = "dsx_megatron.json"
FORMAT = 2
_READ = (1, FORMAT)


@dataclass(frozen=True)
class ExpertNotes:
    """How experts lie: the classes that hold them, and to each expert-parallel rank its experts.

    `held` are numbers among all experts of a layer, in the order in which the rank has them.
    """

    kinds: Sequence[str]
    held: Sequence[Sequence[int]]

    @property
    def count(self) -> int:
        """Experts of a layer."""
        return sum(map(len, self.held))


@dataclass(frozen=True)
class ModelNotes:
    """One model's notes.

    `kind` is the class, `transformer` the plain values of its configuration, `activation` the name
    of that function. `rows` is the vocabulary as it is trained, `vocab_size` what of it is in use,
    None where the run has not said. `cuts`: to each sliced weight the dimension it is cut along and
    the number of runs that a slice has of it (2 where gate and up projection lie in one); of the
    matrices of a GroupedMLP, which hold all of a rank's experts, the dimension counts these first.
    `frequencies` are those of rotary positions, none where there are no such.
    """

    kind: str
    transformer: Mapping[str, Any]
    activation: str
    positions: str
    max_length: int
    rows: int
    vocab_size: int | None
    is_tied: bool
    rotary: Mapping[str, Any]
    frequencies: list[float]
    cuts: Mapping[str, tuple[int, int]]
    experts: ExpertNotes | None = None

    def as_json(self) -> str:
        """Return the text of the file."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n"


def read_notes(directory: Path) -> ModelNotes | None:
    """Return the notes in a checkpoint's directory, None where there are none.

    ValueError for a file of a later format, or one that is not whole.
    """
    path = directory / NOTES
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        format = found.pop("format")
        if format not in _READ:
            raise ValueError(
                f"{path} is of format {format!r}, and this dsx reads {_READ[0]} to {FORMAT}: "
                "export with the dsx that has saved it, or a later one"
            )
        found["cuts"] = {name: tuple(cut) for name, cut in found["cuts"].items()}
        if found.get("experts"):
            found["experts"] = ExpertNotes(**found["experts"])
        return ModelNotes(**found)
    except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {error}): take another tag, or save "
            "the checkpoint again"
        ) from error
