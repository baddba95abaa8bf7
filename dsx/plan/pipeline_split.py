"""Which layers of a model lie on which pipeline stage, in which chunk, as Megatron cuts them.

Layers go to the first chunk of every stage, in the order of stages, then to the second of every
stage, and so on. Stages are equal, but for a first and a last one whose layers are given, and for
an embedding and a loss that count as a layer of the chunk that they are in.
"""

from __future__ import annotations

from dataclasses import dataclass

Layers = tuple[tuple[tuple[int, ...], ...], ...]  # by stage and chunk, numbers from 0


@dataclass(frozen=True)
class PipelineSplit:
    """What Megatron's flags say of it; `chunks` are the virtual stages of a rank."""

    chunks: int = 1
    first: int | None = None  # layers of the first stage
    last: int | None = None
    counts_embedding: bool = False
    counts_loss: bool = False

    def layers(self, num_layers: int, count: int) -> Layers:
        """Return the layers of `count` stages; ValueError where they do not divide."""
        sizes = self._sizes(num_layers, count)
        if any(size % self.chunks for size in sizes):
            raise ValueError(
                f"pipeline stages of {_some(sizes)} layers do not divide into {self.chunks} "
                "virtual stages each"
            )
        found: list[list[tuple[int, ...]]] = [[] for _ in sizes]
        start = 0
        for chunk in range(self.chunks):
            for stage, size in enumerate(sizes):
                own = size // self.chunks
                own -= self.counts_embedding and stage == chunk == 0
                own -= self.counts_loss and stage == count - 1 and chunk == self.chunks - 1
                found[stage].append(tuple(range(start, start + own)))
                start += own
        return tuple(tuple(chunks) for chunks in found)

    def _sizes(self, num_layers: int, count: int) -> list[int]:
        """Return the layers of each stage, what counts as one included."""
        if self.first is None and self.last is None:
            counted = num_layers + self.counts_embedding + self.counts_loss
            if counted % count:
                raise ValueError(f"{counted} layers do not divide into {count} pipeline stages")
            return [counted // count] * count
        if self.counts_embedding or self.counts_loss:
            raise ValueError(
                "an embedding or a loss that counts as a layer of a pipeline, and "
                "--decoder-first-pipeline-num-layers or the last one: Megatron takes one of both"
            )
        ends = [size for size in (self.first, self.last) if size is not None]
        middle, left = count - len(ends), num_layers - sum(ends)
        if middle < 0 or left < 0 or (left % middle if middle else left):
            raise ValueError(
                f"{num_layers} layers with {' and '.join(map(str, ends))} of them on a first or "
                f"last stage: {left} do not divide into {max(middle, 0)} pipeline stages"
            )
        between = [left // middle] * middle if middle else []
        first = [] if self.first is None else [self.first]
        last = [] if self.last is None else [self.last]
        return first + between + last


def _some(sizes: list[int]) -> str:
    return " and ".join(map(str, sorted(set(sizes))))
