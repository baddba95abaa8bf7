"""Megatron-core as the inner engine: TP, PP, virtual stages, CP and DP in a cluster, unmodified.

The outer update happens when the optimizer instance's `step` returns, before the next forward: the
masters are written, and copied to the weights as Megatron itself does after a step. Traps that
the code answers:

- whether the weights are written is decided from the schedule, never from "do I own something":
  the distributed optimizer does it by a collective, of whose ranks one may own nothing;
- with overlap_param_gather the gather belongs to the next forward, which sees what was written;
  outside of a step (at the end, for an export) it is done at once;
- a step that overflowed returns False and still counts, or the clusters' clocks drift apart.

All ranks of a pipeline stage decide as one, stages on their own. Where the masters are is known in
masters.py, names and slices in parameters.py, weights that several ranks hold alike in
engines/copies.py and copies.py, what no gradient moves in router_bias.py. Without the distributed
optimizer data- and context-parallel ranks hold the same masters, expert-data-parallel ranks the
same experts, and they divide the outer step among them (replicated.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from dsx.core.accelerators import missing_accelerators
from dsx.core.recorder import ComputeRecorder
from dsx.core.types import BackwardTrigger, Stage
from dsx.engines.cluster_collectives import ClusterCollectives, collective_device
from dsx.engines.compute_trace import ComputeWatch
from dsx.engines.copies import TensorParallelCopies
from dsx.engines.masters import Masters, Piece
from dsx.engines.megatron.copies import find_tied_weights
from dsx.engines.megatron.features import refuse_unsupported
from dsx.engines.megatron.fully_sharded import drop_gathered_of, is_megatron_fsdp, own
from dsx.engines.megatron.masters import gather, leaves, locate
from dsx.engines.megatron.model_notes import NoteTaker
from dsx.engines.megatron.parameters import (
    Coordinates,
    Parameter,
    micro_batches,
    name_parameters,
    stage_shapes,
)
from dsx.engines.megatron.refusals import captured_by
from dsx.engines.megatron.router_bias import RouterBiases, places_of_biases
from dsx.engines.multi_rank import MultiRankAdapter
from dsx.engines.replicated import ReplicaSets
from dsx.engines.tied_weights import TiedWeights
from dsx.engines.untrained import Untrained
from dsx.method.fragments import Fragmenter, assign_stage
from dsx.method.schedule.inside_backward import require_backwards, require_before, require_hooks

logger = logging.getLogger(__name__)


class MegatronAdapter(MultiRankAdapter):
    """One rank's masters inside Megatron's optimizer; creating it is collective in the cluster."""

    tells_model = True  # by flags of its own, whatever `dsx.plan` names

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Any,
        fragmenter: Fragmenter,
        keeps_state_on_host: bool = False,
        backwards: int = 1,
        vocab_size: int | None = None,
    ) -> None:
        refuse_unsupported(chunks, optimizer)
        self._is_fully_sharded = drop_gathered_of(chunks) or any(map(is_megatron_fsdp, chunks))
        self._backwards = backwards  # micro-batches, where Megatron's calculator has no number
        self._chunks = chunks
        self._optimizer = optimizer
        self.places = [*locate(optimizer), *places_of_biases(chunks)]
        self.coordinates = Coordinates.read()
        self.stage = Stage(*self.coordinates.pipeline)
        self.ranks = ClusterCollectives(_stage_group(self.coordinates))
        trained = [p for place in self.places for p in place.parameters()]
        named = ((name, own(p)) for chunk in chunks for name, p in chunk.named_parameters())
        self._untrained = Untrained(named, trained)
        parameters = name_parameters(chunks, trained, self.coordinates)
        self.note_taker = NoteTaker(chunks, parameters, vocab_size)
        shapes = stage_shapes(parameters, self.coordinates)
        self.assignment = assign_stage(fragmenter, shapes, self.stage)
        moved = {id(one) for place in self._biases() for one in place.parameters()}
        by_gradient = {p.name: p.tensor for p in parameters if id(p.tensor) not in moved}
        self._hold_members(self.assignment, by_gradient)
        self.is_sharded = any(place.is_sharded for place in self.places)
        self._written: dict[int, None] = {}  # fragments, since they were gathered last
        masters = self._take_pieces(parameters, shapes)
        device = next(iter(chunks[0].parameters())).device
        self._hold(masters, device, keeps_state_on_host)
        if device.type == "cuda" and dist.get_rank() == 0:
            for line in missing_accelerators():
                logger.info(line)

    def _take_pieces(self, parameters: Sequence[Parameter], shapes: Sequence[Any]) -> Masters:
        """Return this rank's masters; find what it synchronises, and broadcasts or receives."""
        place, device = self.coordinates, collective_device()
        names = {id(parameter.tensor): parameter.name for parameter in parameters}
        located: dict[str, Piece] = {}
        for master_place in self.places:
            for tensor, piece in master_place.pieces():
                located[names[id(tensor)]] = piece
        _require_fp32(located)
        tied = {p.name for p in parameters if p.is_tied_copy}
        alike = {p.name for p in parameters if p.is_alike()} if place.tensor[0] else set[str]()
        own = {n: piece for n, piece in located.items() if n not in tied | alike}
        biases = {names[id(one)] for bias in self._biases() for one in bias.parameters()}
        whole = set(own) & biases if self.is_sharded else set(own)
        self._replica_shards = None
        if biases or not self.is_sharded:
            experts = {p.name for p in parameters if p.is_expert}
            sets = [
                {n: own[n] for n in own if n in whole and (n in experts) == is_set}
                for is_set in (False, True)
            ]
            self._replica_shards = ReplicaSets(self.assignment, sets, _groups_alike(), device)
            parts = self._replica_shards.pieces
            own = {n: piece for n, piece in own.items() if n not in whole} | parts
        self._copies = None
        if place.tensor[1] > 1:
            group: Any = parallel_state.get_tensor_model_parallel_group()
            copied = {p.name for p in parameters if p.is_alike() and not p.is_tied_copy}
            self._copies = TensorParallelCopies(copied, self.assignment, located, group, device)
        self._tied_weights = TiedWeights(find_tied_weights(parameters, place), device)
        self._tied_weights.locate(
            self.assignment, {**{n: located[n] for n in tied & set(located)}, **own}
        )
        return Masters(shapes, self.assignment, own, self.stage.index)

    def _biases(self) -> list[RouterBiases]:
        return [place for place in self.places if isinstance(place, RouterBiases)]

    def sync_model_weights(self) -> None:
        """Copy all masters to the weights of every rank; collective in the cluster."""
        everything = range(len(self.fragments))
        self._all_gather(everything)
        self._tied_weights.broadcast(everything)
        self._copy()
        if self.is_sharded:
            gather(self._chunks, at_once=True)

    @property
    def inner_optimizers(self) -> list[Any]:
        """Torch's optimizers inside Megatron's, which hold the moments."""
        return [getattr(leaf, "optimizer", leaf) for leaf in leaves(self._optimizer)]

    def inner_lr(self) -> float:
        """Return the first parameter group's rate; 0 on a rank that steps nothing."""
        groups = self._optimizer.param_groups
        return float(groups[0]["lr"]) if groups else 0.0

    def facts(self) -> dict[str, Any]:
        """Return what must be the same on the ranks of this number in all clusters."""
        kinds = [type(place).__name__ for place in self.places]
        return {
            "megatron": {
                **{k: list(v) for k, v in asdict(self.coordinates).items()},
                "virtual_stages": len(self._chunks),
                "masters": kinds,
            }
        }

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back in the last micro-batch's backward of a step.

        ValueError for `when="after"`, for another number of micro-batches than Megatron's, and for
        captured graphs, which call no hooks.
        """
        require_before(when, "Megatron")
        if self._is_fully_sharded:
            raise ValueError(
                f"dsx.schedule.when={when!r} launches a layer inside the backward, of which fully "
                "sharded data parallelism tells nothing: use schedule.type='streaming' with "
                "delay.type='average', or leave out --use-torch-fsdp2 and --use-megatron-fsdp"
            )
        for chunk in self._chunks:
            require_hooks(when, captured_by(chunk.config))
        count = partial(micro_batches, self._backwards)
        require_backwards(self._backwards, count(), "Megatron's number of micro-batches")
        self._follow_backward(self._chunks, count, callback)

    def trace_compute(self, trace: ComputeRecorder) -> None:
        """Record forward and backward, by micro-batch and chunk, and the optimizer's step."""
        watch = ComputeWatch(trace)
        for chunk in self._chunks:
            watch.follow(chunk)
        self._optimizer.step = watch.around_step(self._optimizer.step)

    def on_inner_step(self, callback: Callable[[bool], bool]) -> None:
        """Call back once per `optimizer.step()`, with whether Megatron skipped it.

        The callback returns whether it wrote masters.
        """
        take_step = self._optimizer.step

        def step(*args: Any, **kwargs: Any) -> Any:
            self._untrained.require_frozen()
            result = take_step(*args, **kwargs)
            was_taken, *_ = result
            if self._synchronize_masters(callback(not was_taken)):
                self._copy()
                if self.is_sharded:
                    gather(self._chunks)
            self.end_inner_step()
            return result

        self._optimizer.step = step

    def _copy(self) -> None:
        with torch.no_grad():
            for place in self.places:
                place.copy()


def _stage_group(place: Coordinates) -> Any:
    """Return a group of the ranks of this pipeline stage. Collective in the cluster."""
    everyone = place.everyone()
    groups: list[Any] = []
    for index in range(place.pipeline[1]):
        ranks = [rank for rank, other in enumerate(everyone) if other.pipeline[0] == index]
        groups.append(dist.new_group(ranks))
    return groups[place.pipeline[0]]


def _groups_alike() -> list[Any]:
    """Return the groups whose ranks hold the same masters: of dense layers, and of experts."""
    state: Any = parallel_state
    return [
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_expert_data_parallel_group(),
    ]


def _require_fp32(pieces: dict[str, Piece]) -> None:
    """Raise ValueError for masters of another type."""
    for name, piece in pieces.items():
        if (held := piece.view().dtype) != torch.float32:
            raise ValueError(
                f"the master copy of {name} is {held}, not fp32: use --bf16 or --fp16 with "
                "Megatron's mixed-precision optimizers and --main-params-dtype fp32, or fp32"
            )
