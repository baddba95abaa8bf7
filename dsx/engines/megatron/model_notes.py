"""What a Megatron rank notes of its model for those who have only the files (megatron_model)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dsx.engines.cluster_collectives import gather_objects
from dsx.engines.megatron.parameters import Coordinates, Parameter, unwrapped
from dsx.engines.megatron_model.experts import ExpertName
from dsx.engines.megatron_model.notes import ExpertNotes, ModelNotes
from dsx.engines.settings import plain


class NoteTaker:
    """Notes of the chunks of this rank; `vocab_size` without the rows that pad the vocabulary.

    ValueError for a `vocab_size` that the model has not as many rows for, or tells none of.
    """

    def __init__(
        self, chunks: Sequence[Any], parameters: Sequence[Parameter], vocab_size: int | None
    ) -> None:
        self._model = unwrapped(chunks[0])
        if vocab_size is not None:
            _require_rows(self._model, vocab_size)
        self._vocab_size = vocab_size
        self._cuts = _cuts(parameters, self._model.config)
        self._experts = _experts(chunks)

    def take(self) -> ModelNotes:
        """Return the notes of the whole model. Collective in the cluster."""
        cuts: dict[str, tuple[int, int]] = {}
        kinds: set[str] = set()
        held: dict[int, list[int]] = {}  # by expert-parallel rank
        for of_rank, (of_classes, of_experts) in gather_objects((self._cuts, self._experts)):
            cuts |= of_rank
            kinds |= of_classes
            held |= of_experts
        model = self._model
        positions: Any = getattr(model, "rotary_pos_emb", None)
        frequencies = getattr(positions, "inv_freq", None)
        activation = model.config.activation_func
        return ModelNotes(
            type(model).__name__,
            _settings(model.config),
            getattr(activation, "__name__", type(activation).__name__),
            str(getattr(model, "position_embedding_type", None)),
            int(getattr(model, "max_sequence_length", 0)),
            int(getattr(model, "vocab_size", 0)),
            self._vocab_size,
            bool(getattr(model, "share_embeddings_and_output_weights", False)),
            {
                "base": getattr(model, "rotary_base", None),
                "percent": getattr(model, "rotary_percent", None),
                "is_scaled": getattr(model, "rotary_scaling", None),
                "interpolation": getattr(positions, "seq_len_interpolation_factor", None),
            },
            [] if frequencies is None else frequencies.tolist(),
            dict(sorted(cuts.items())),
            ExpertNotes(sorted(kinds), [held[rank] for rank in sorted(held)]) if held else None,
        )


def _require_rows(model: Any, vocab_size: int) -> None:
    """Refuse a vocabulary that the model has not as many rows for, or tells none of."""
    rows: int | None = getattr(model, "vocab_size", None)
    if rows is None:
        raise ValueError(
            f"vocab_size={vocab_size}: a {type(model).__name__} has no vocab_size, which would "
            "tell how many rows its vocabulary has; leave it out"
        )
    if not 1 <= vocab_size <= rows:
        raise ValueError(
            f"vocab_size={vocab_size} must be between 1 and the {rows} rows of the model's "
            "vocabulary, padding included; leave it out where it is not known"
        )


def _settings(config: Any) -> Mapping[str, Any]:
    """Return a configuration's plain values, without the paths of a site."""
    values = plain(vars(config))
    return {k: v for k, v in values.items() if not k.endswith(("_dir", "_path", "_file"))}


def _cuts(parameters: Sequence[Parameter], config: Any) -> Mapping[str, tuple[int, int]]:
    """Return how this rank's slices are cut: the dimension, and the runs of the whole in each.

    Not of what nothing marks as cut: an export refuses it. Experts are cut by what they are, as
    not every class marks them.
    """
    is_gated = getattr(config, "gated_linear_unit", False)
    found: dict[str, tuple[int, int]] = {}
    for parameter in parameters:
        if parameter.is_slice and parameter.is_expert:
            if expert := ExpertName.of(parameter.plain):
                found[parameter.plain] = expert.cut(is_gated)
        elif parameter.is_slice and not parameter.is_tied_copy:
            # not every release says so of a gated unit's matrix, whose ranks hold both halves
            is_two = is_gated and ".linear_fc1." in parameter.plain
            runs = 2 if is_two else getattr(parameter.tensor, "partition_stride", 1)
            dimension = getattr(parameter.tensor, "partition_dim", -1)
            if dimension >= 0:
                found[parameter.plain] = (dimension, runs)
    return found


def _experts(chunks: Sequence[Any]) -> tuple[set[str], Mapping[int, list[int]]]:
    """Return the classes that hold this rank's experts, and the numbers of these, by its rank.

    The numbers are those of Megatron's layers, which are the same in all of them.
    """
    kinds: set[str] = set()
    held: dict[int, list[int]] = {}
    rank = Coordinates.read().expert[0]
    for chunk in chunks:
        for layer in unwrapped(chunk).modules():
            if hasattr(layer, "local_expert_indices") and hasattr(layer, "experts"):
                kinds.add(type(layer.experts).__name__)
                held[rank] = list(layer.local_expert_indices)
    return kinds, held
