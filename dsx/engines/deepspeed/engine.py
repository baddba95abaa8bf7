"""DeepSpeed as the inner engine: ZeRO-0 to ZeRO-3, pipelines, fp32, bf16 and fp16, unmodified.

The outer update happens inside the inner step, in the step hook of the basic optimizer: the
fp32 masters are updated, the bit16 weights not yet gathered, so DeepSpeed's own copy and all-gather
carry our change and nothing is sent twice. Traps that the code answers:

- the hook fires once per parameter group under ZeRO-1/2 and per sub-group under ZeRO-3: we act in
  the last firing, when all masters are fresh, and redo the local bit16 copy of those before;
- it does not fire on an overflow step: the boundary still counts (`_take_model_step` is wrapped),
  or the clusters' clocks would drift apart, and a collective brings the weights up to date;
- whether to call that one is decided from the schedule, never from "do I own something": a rank
  may own nothing of a fragment;
- the stages of a pipeline launch and apply at steps of their own: every collective of the outer
  step runs over the ranks of one stage, only tied weights go further (pipeline.py).

Where the masters are is known in masters.py, which ranks hold which parameters (experts, slices)
in layout.py. Without ZeRO all data-parallel ranks hold the same masters, and divide the outer step
among them (replicated.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dsx.core.recorder import ComputeRecorder
from dsx.core.types import BackwardTrigger
from dsx.engines.cluster_collectives import ClusterCollectives, collective_device
from dsx.engines.compute_trace import ComputeWatch
from dsx.engines.copies import TensorParallelCopies
from dsx.engines.deepspeed.features import refuse_unsupported
from dsx.engines.deepspeed.layout import read_layout
from dsx.engines.deepspeed.masters import locate, require_fp32
from dsx.engines.deepspeed.parameters import stepping_optimizer, trained_parameters
from dsx.engines.deepspeed.pipeline import find_tied_weights, name_in_model, stage_of
from dsx.engines.deepspeed.private import leave_out_shared_memory, replace_step, require_names
from dsx.engines.masters import Masters, Piece
from dsx.engines.multi_rank import MultiRankAdapter
from dsx.engines.replicated import ReplicaSets
from dsx.engines.tied_weights import TiedWeights
from dsx.engines.untrained import Untrained
from dsx.method.fragments import Fragmenter, assign_stage
from dsx.method.schedule.inside_backward import require_backwards, require_before


class DeepSpeedAdapter(MultiRankAdapter):
    """One rank's masters inside a `DeepSpeedEngine`."""

    def __init__(
        self,
        engine: Any,
        fragmenter: Fragmenter,
        keeps_state_on_host: bool = False,
        backwards: int = 1,
    ) -> None:
        refuse_unsupported(engine)
        self._backwards = backwards  # as configured; the engine's own number counts
        self._engine = engine
        self._place = locate(engine)
        self.stage = stage_of(engine)
        trained = trained_parameters(engine)
        self._untrained = Untrained(engine.module.named_parameters(), trained.values())
        self.layout = read_layout(engine, name_in_model(engine, trained))
        self.ranks = ClusterCollectives(self.layout.group)
        parameters = self.layout.parameters
        self._tied_weights = TiedWeights(find_tied_weights(engine, parameters), collective_device())
        shapes = [s for s in self.layout.shapes if s.name not in self._tied_weights.replicas]
        assignment = assign_stage(fragmenter, shapes, self.stage)
        self._hold_members(assignment, parameters)
        pieces = self._take_pieces(assignment)
        device = self._place.optimizer_tensors()[0].device
        masters = Masters(shapes, assignment, pieces, self.stage.index)
        self._hold(masters, device, keeps_state_on_host)
        self._written: dict[int, None] = {}  # fragments, since they were gathered last
        self._expected: set[int] | None = None  # masters of the step being taken, if any
        self._stepped: set[int] = set()
        self._is_passed = False

    def _take_pieces(self, assignment: Sequence[Sequence[str]]) -> dict[str, Piece]:
        """Return what this rank synchronises; find what it broadcasts or receives beside that."""
        device, layout = collective_device(), self.layout
        located = self._place.pieces(layout.parameters)
        require_fp32(located)
        replicas = self._tied_weights.replicas
        copies = {n: piece for n, piece in located.items() if n in replicas}
        mine = {
            n: piece
            for n, piece in located.items()
            if n not in copies and (layout.is_first_of_alike or n not in layout.alike)
        }
        self._replica_shards = None
        if not self._place.is_sharded:
            dense = self._engine.seq_data_parallel_group
            sets = layout.sets_alike(list(mine), dense)
            wholes = [{name: mine[name] for name in names} for names, _ in sets]
            groups = [group for _, group in sets]
            self._replica_shards = ReplicaSets(assignment, wholes, groups, device)
            mine = self._replica_shards.pieces
        if layout.tensor_group is not None:
            self._copies = TensorParallelCopies(
                layout.alike, assignment, located, layout.tensor_group, device
            )
        self._tied_weights.locate(assignment, {**copies, **mine})
        return mine

    def sync_model_weights(self) -> None:
        """Copy masters to bit16 weights and gather them; collective in the cluster."""
        self._all_gather(range(len(self.fragments)))
        self._tied_weights.broadcast(range(len(self.fragments)))
        self._place.sync_model_weights()

    def inner_lr(self) -> float:
        """Return the first parameter group's rate."""
        return float(stepping_optimizer(self._engine).param_groups[0]["lr"])

    def watch_backward(self, callback: Callable[[int], None], when: BackwardTrigger) -> None:
        """Call back in the last micro-batch's backward of a step.

        ValueError for `when="after"`, and for another number of micro-batches than the engine's.
        """
        require_before(when, "DeepSpeed")
        count = self._engine.gradient_accumulation_steps
        require_backwards(self._backwards, count(), "gradient_accumulation_steps")
        self._follow_backward([self._engine.module], count, callback)

    def trace_compute(self, trace: ComputeRecorder) -> None:
        """Record forward and backward, by micro-batch, the reduction and the optimizer's step."""
        engine, watch = self._engine, ComputeWatch(trace)
        watch.follow(engine.module)
        replace_step(engine, watch.around_step)
        reduce_gradients = engine.allreduce_gradients

        def reduce(*args: Any, **kwargs: Any) -> None:
            with trace.span("reduce gradients", "backward"):
                reduce_gradients(*args, **kwargs)

        engine.allreduce_gradients = reduce

    def on_inner_step(self, callback: Callable[[bool], bool]) -> None:
        """Call back once per step boundary, with whether the step was skipped.

        The callback returns whether it wrote masters.
        """
        engine = self._engine

        def after_optimizer(optimizer: Any, args: Any, kwargs: Any) -> None:
            if self._expected is None or self._is_passed:
                return
            self._stepped |= {id(p) for group in optimizer.param_groups for p in group["params"]}
            if self._stepped >= self._expected:
                self._is_passed = True
                if self._synchronize_masters(callback(False)):
                    self._place.refresh()

        def around(take_model_step: Callable[..., Any]) -> Callable[..., None]:
            def take(*args: Any, **kwargs: Any) -> None:
                self._untrained.require_frozen()
                self._expected = {id(master) for master in self._place.optimizer_tensors()}
                self._stepped = set()
                self._is_passed = False
                take_model_step(*args, **kwargs)
                self._expected = None
                if not self._is_passed and self._synchronize_masters(callback(True)):
                    self._place.sync_model_weights()  # overflow: the optimizer did not step
                self.end_inner_step()

            return take

        stepping_optimizer(engine).register_step_post_hook(after_optimizer)
        replace_step(engine, around)


def adopt_world() -> None:
    """Let DeepSpeed take this cluster's world, which a `PipelineModule` needs to be built.

    Without its shared-memory collective on CPU-only hosts: that one serves inference only, needs
    a C++ build of a minute or two at the first start, and ignores process groups.
    RuntimeError for a DeepSpeed that lacks a name which dsx uses.
    """
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    require_names()
    accelerator: Any = get_accelerator()
    if accelerator.device_name() == "cpu":
        leave_out_shared_memory()
    init_distributed: Any = deepspeed.init_distributed
    init_distributed()


def start_engine(**arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Call DeepSpeed's own `initialize`, which `dsx.run` replaces, in this cluster's world."""
    import deepspeed

    adopt_world()
    start: Any = getattr(deepspeed.initialize, "plain", deepspeed.initialize)
    return start(**arguments)
