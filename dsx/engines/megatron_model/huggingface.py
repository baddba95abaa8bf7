"""A Megatron run's averaged model under the names, and in the form, of Hugging Face.

Its weights are made one at a time. Of Megatron's matrices the one used last is kept, as queries,
keys and values, and gate and up projection, come of one.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from dsx.engines.megatron_model.family import family_of
from dsx.engines.megatron_model.joined import JoinedModel
from dsx.engines.megatron_model.parts import parts_of


class HuggingFaceModel:
    """The weights that transformers loads, and the config.json that goes with them.

    `parameters` are by name, in the model's order.
    ValueError for what has no form there, and for weights that the run lacks or has beside those.
    """

    def __init__(self, joined: JoinedModel) -> None:
        where = joined.saved.directory
        self._joined = joined
        self._family = family_of(joined.notes, where)
        self._last: tuple[str, Tensor] | None = None
        self.config = self._family.config
        self.aliases: Mapping[str, str] = {}
        self.copies: Mapping[str, str] = {}
        self.parameters = parts_of(list(self._family.matches(joined.parameters)))
        wanted = {part.match.source for part in self.parameters.values()}
        lacking = sorted(wanted - joined.parameters.keys())
        if lacking:
            raise ValueError(
                f"{where} lacks {lacking[0]} and {len(lacking) - 1} more weights of a "
                f"{self._family.kind}: what is frozen is not in it; let Megatron's own checkpoint "
                "of the iteration be converted"
            )
        beside = sorted(joined.parameters.keys() - wanted)
        if beside:
            raise ValueError(
                f"{where} holds {beside[0]} and {len(beside) - 1} more weights that a "
                f"{self._family.kind} of Hugging Face's transformers does not have; dsx export "
                "--out DIR writes them under Megatron's names"
            )

    def tensor(self, name: str) -> Tensor:
        """Return one weight, fp32."""
        part = self.parameters[name]
        source = part.match.source
        if self._last is None or self._last[0] != source:
            self._last = None  # before the next is read
            self._last = source, self._joined.tensor(source)
        return part.match.split(self._last[1])[part.index]
