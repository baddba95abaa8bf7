"""The parts of a fragment, each beside its elements of what travels.

What a launch sends is written there, and a mean is read there, one part after another (parts.py),
so neither is anywhere else in full: where ranks put matrices together, a part is a range of a
piece, as pieces pass from where matrices are to where masters are, and back. Where a step
needs all of a fragment at once, and where the state is on an accelerator, it is one part, in work
space.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from dsx.core.engine import EngineAdapter
from dsx.method.method import Method
from dsx.method.outer_optimizer import OuterOptimizer
from dsx.outer.parts import Part, parts_of
from dsx.outer.state import StateStore
from dsx.outer.whole_matrices import MatrixGather, WirePiece, cut
from dsx.outer.work_space import is_cut, part_length


@dataclass(frozen=True)
class WirePart:
    """A part, with its elements of a mean, and where those of what is sent go, `[part.numel]`.

    Either may be None, and both the same memory. `is_in_work_space`: the mean is, to be changed;
    else it is to stay as it came.
    """

    part: Part
    mean: Tensor | None
    sent: Tensor | None
    is_in_work_space: bool = False


class WireParts:
    """Those of one rank's fragments."""

    def __init__(
        self,
        method: Method,
        adapter: EngineAdapter,
        gathers: Sequence[MatrixGather],
        state: StateStore,
    ) -> None:
        self._method = method
        self._adapter = adapter
        self._gathers = gathers
        self._state = state

    def of(
        self,
        fragment: int,
        mean: Tensor | None,
        sent: Tensor | None,
        rule: OuterOptimizer | None = None,
    ) -> Iterator[WirePart]:
        """Yield the parts of a fragment, at least one, for a launch or the outer step of `rule`.

        `mean` and `sent` are as they travel. What is written to a part of what is sent is there in
        full at the end. Collective over the cluster's ranks where they put matrices together.
        """
        numel, gather = self._adapter.fragments[fragment].numel, self._gathers[fragment]
        if mean is None and sent is None:
            for part in parts_of(numel, self._state.device, self._method, rule):
                yield WirePart(part, None, None)
        elif self._is_elsewhere(mean) or (gather.is_needed and not is_cut(self._method, rule)):
            yield from self._in_one(fragment, mean, sent)
        else:
            longest = max(part_length(numel, self._method, False, rule), 1)
            has_any = False
            for piece in gather.pieces(mean, sent, self._adapter.ranks.all_to_all):
                for start in range(0, piece.numel, longest):
                    has_any = True
                    yield _part_of(piece, start, min(start + longest, piece.numel))
            if not has_any:
                yield WirePart(Part(0, 0), cut(mean, 0, 0), cut(sent, 0, 0))

    def _in_one(
        self, fragment: int, mean: Tensor | None, sent: Tensor | None
    ) -> Iterator[WirePart]:
        """Yield a fragment as one part, in work space where the state is."""
        gather, all_to_all = self._gathers[fragment], self._adapter.ranks.all_to_all
        whole = self._state.whole(fragment, "mean")
        if mean is not None:
            gather.from_wire(mean, whole, all_to_all)
        of_mean, of_sent = (None if x is None else whole for x in (mean, sent))
        yield WirePart(Part(0, whole.numel()), of_mean, of_sent, is_in_work_space=True)
        if sent is not None:
            gather.to_wire(whole, sent, all_to_all)

    def _is_elsewhere(self, mean: Tensor | None) -> bool:
        return mean is not None and mean.device.type != self._state.device.type


def _part_of(piece: WirePiece, start: int, stop: int) -> WirePart:
    part = Part(piece.offset + start, piece.offset + stop)
    return WirePart(part, cut(piece.mean, start, stop), cut(piece.sent, start, stop), piece.is_copy)
