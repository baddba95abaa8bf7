"""A method is one choice on each axis: fragments, schedule, control, delay, codec, outer rule.

The axes are those of the papers (see presets.py for the named rows). A method is frozen and
stateless; `validate` refuses combinations that cannot work, says which setting would, and warns
of settings that are known to diverge or to need more rounds.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

from dsx.compress.base import Compressor, Dense
from dsx.core.checks import require_bounds
from dsx.core.registry import Names
from dsx.core.types import History, SyncParams
from dsx.method.alarms import GuardAction
from dsx.method.control.base import Control, Fixed
from dsx.method.delay.base import DelayPolicy, Keeps
from dsx.method.fragments import Fragmenter, usual_count
from dsx.method.ladder import Ladder
from dsx.method.outer_optimizer import OuterOptimizer
from dsx.method.schedule.base import Schedule
from dsx.method.stability import largest_stable_rate, too_few_rounds
from dsx.method.staleness import NoPenalty, Staleness

_SAFE_SHARE = 0.8  # of the largest stable outer rate
_IDLE_ROUNDS, _IDLE_STEPS = 3, 50


class SettingWarning(UserWarning):
    """A setting that runs, but is known to diverge or to train badly."""


@dataclass(frozen=True)
class Method:
    """One choice on each axis, frozen: what a preset returns, and what `SimulatedClusters` runs.

    `validate` says whether they go together. Another choice on an axis, or another H, is
    `dataclasses.replace`, or an override of `dsx.preset`.
    """

    fragments: Fragmenter
    """Which parameters are synchronised together."""
    schedule: Schedule
    """At which inner steps which fragments are sent."""
    delay: DelayPolicy
    """How late a mean is applied, and how it is merged with the progress made meanwhile."""
    outer_optimizer: OuterOptimizer
    """The step of the anchor along the averaged pseudo-gradient."""
    staleness: Staleness = field(default_factory=NoPenalty)
    """What is done to a pseudo-gradient that comes late."""
    control: Control = field(default_factory=Fixed)
    """What may change H and the rank while training."""
    compression: Compressor = field(default_factory=Dense)
    """How pseudo-gradients are coded on the wire."""
    on_mismatch: Literal["resend", "stop"] = "stop"
    """What to do when clusters hold different models and none is held by more than half of them
    (outer/parity_check.py)."""
    anchor_check_interval: int = 8
    """After how many rounds of a fragment clusters compare their anchors; 0: never."""
    max_idle_rounds: int | None = None
    """Rounds in a row without an inner step of a cluster, after which all stop; 0: never."""
    max_norm_ratio: float | None = 1000.0
    """The largest norm of what a cluster sends, in that of the others; None: any."""
    guard: GuardAction = "warn"
    """What is done where outer training goes wrong by its own figures (outer/guard.py)."""

    @property
    def guards(self) -> bool:
        """Whether there is anything to guard: what is sent are pseudo-gradients."""
        return self.guard != "off" and self.outer_optimizer.keeps_anchor

    @property
    def codes_keep_norms(self) -> bool:
        """Whether a mean is, but for some percent, that of contributions whose norms are known."""
        has_residual = getattr(self.compression, "error_feedback", "none") != "none"
        return self.codes_are_fine and (self.encodes_at_launch or not has_residual)

    @property
    def codes_are_fine(self) -> bool:
        """Whether coding, of contributions and of means, loses no more than some percent."""
        return self.compression.is_fine

    @property
    def sync_params(self) -> SyncParams:
        """The initial H."""
        return SyncParams(interval=self.schedule.interval)

    @property
    def idle_rounds_allowed(self) -> int:
        """After how many idle rounds in a row all clusters stop; 0: never.

        Not said: at least 3, and as many as 50 steps take, since the first steps of fp16 are
        skipped until a loss scale is found.
        """
        if self.max_idle_rounds is not None:
            return self.max_idle_rounds
        return max(_IDLE_ROUNDS, math.ceil(_IDLE_STEPS / self.schedule.interval))

    @property
    def max_in_flight(self) -> int:
        """Return how many transfers of one fragment may be under way at a time."""
        return self.delay.rounds_under_way + 1

    @property
    def uses_seconds(self) -> bool:
        """Whether measured times have to travel with the transfers."""
        return any(x.uses_seconds for x in (self.schedule, self.control, self.delay))

    @property
    def keeps_round_start(self) -> bool:
        """Whether the parameters at the start of a round have to be kept for the penalty."""
        return self.staleness.is_active and not self.delay.restarts_from_anchor

    @property
    def measures_tensors(self) -> bool:
        """Whether a choice asks for norms of single tensors, which take work space."""
        of_penalty = self.staleness.is_active and not self.staleness.is_elementwise
        return of_penalty or self.delay.measures_tensors or self.outer_optimizer.measures_tensors

    @property
    def keeps(self) -> Keeps | None:
        """What is kept of a transfer until it is applied (delay/base.py).

        Nothing where the delay needs it for parameters that change meanwhile, and none do: what is
        applied at the boundary of its launch, and was not sent before that step's update.
        """
        is_current = not self.delay.steps and not self.delay.rounds_under_way
        if is_current and self.schedule.when != "before" and not self.delay.keeps_current:
            return None
        return self.delay.keeps

    @property
    def encodes_at_launch(self) -> bool:
        """Whether codes are made once for all attempts: the delay needs what is decoded of them."""
        return self.delay.keeps == "contribution" and not self.compression.is_exact

    @property
    def waits_for_codes(self) -> bool:
        """Whether the training thread makes them: they are asked for before the mean is there."""
        return self.encodes_at_launch and self.max_in_flight > 1

    @property
    def codes_wait(self) -> bool:
        """Whether the transfer's thread makes them, and what is decoded of them."""
        return self.encodes_at_launch and not self.waits_for_codes

    def validate(
        self,
        num_clusters: int | None = None,
        num_steps: int | None = None,
        num_fragments: int | None = None,
    ) -> None:
        """Raise ValueError, with the value, what is allowed and the nearest setting that works.

        Given the number of clusters, it also issues a `SettingWarning` for an outer rate beyond
        0.8 of what is stable, and for a delay of more than half of H; given the number of inner
        steps to be taken, for too few rounds. `num_fragments` is the model's, where the fragmenter
        alone cannot know it.
        """
        require_bounds("fragments", self.fragments)
        count = num_fragments if num_fragments is not None else usual_count(self.fragments)
        self.schedule.validate(count)
        self.control.validate(self.sync_params)
        self.delay.validate(self.schedule.interval)
        self.staleness.validate()
        self.compression.validate()
        lowest = self.control.lowest_interval(self.sync_params)
        self._validate_lowest(lowest, count)
        if self.delay.steps == "auto":
            self.delay.validate(lowest)
        elif self.delay.steps >= lowest:
            raise ValueError(
                f"control.min_interval={lowest} lets H fall to delay.steps={self.delay.steps}: a "
                "fragment's transfer has to be applied before its next launch; use min_interval "
                f">= {self.delay.steps + 1} or fewer steps"
            )
        self.outer_optimizer.validate()
        self._validate_rank()
        self._validate_anchor()
        self._validate_rule()
        self._validate_own_share()
        Ladder(self, count).require_rungs()
        for text in self._concerns(num_clusters, num_steps):
            warnings.warn(text, SettingWarning, stacklevel=2)

    def _validate_lowest(self, lowest: int, num_fragments: int | None) -> None:
        """Require that the schedule can serve the smallest H a controller may set."""
        if lowest == self.schedule.interval:
            return
        try:
            replace(cast(Any, self.schedule), interval=lowest).validate(num_fragments)
        except ValueError as error:
            raise ValueError(
                f"control.min_interval={lowest} lets H fall to where {error}; or raise min_interval"
            ) from None

    def _validate_rank(self) -> None:
        """Require a rank for a codec that needs one, of its own or of a controller, not two."""
        if not self.compression.captures_spectrum:
            return
        own = getattr(self.compression, "rank", None)
        controlled = self.control.sync_params(self.sync_params, History(0)).rank
        if own is None and controlled is None:
            raise ValueError(
                "compression.rank is missing: give it, e.g. 64, or let control.type="
                "'adaptive_rank' choose it"
            )
        if None not in (own, controlled) and own != controlled:
            raise ValueError(
                f"compression.rank={own} and control.rank={controlled} are one rank, which the "
                "controller starts from: leave compression.rank out"
            )

    def _validate_anchor(self) -> None:
        """Averaged parameters go without an outer step, pseudo-gradients need one."""
        has_anchor = self.outer_optimizer.keeps_anchor
        if self.delay.needs_anchor and not has_anchor:
            raise ValueError(
                "outer_optimizer.type='none' keeps no anchor, which this delay measures "
                "pseudo-gradients from; use delay.type='average', or outer_optimizer.type='sgd' "
                "with lr 1, which also makes the anchor the mean of the clusters"
            )
        if has_anchor and not self.delay.needs_anchor:
            raise ValueError(
                "delay.type='average' replaces parameters by their mean and takes no outer step: "
                "set outer_optimizer.type='none', or use delay.type='blocking' with this rule"
            )
        if self.schedule.uses_norms and not self.delay.needs_anchor:
            raise ValueError(
                "schedule.type='adaptive' sends the fragment whose mean progress is largest, and "
                "delay.type='average' sends parameters, whose size says nothing of it; use "
                "schedule.type='streaming', or delay.type='streaming' with an outer rule"
            )
        if self.control.sideband_numel(self.sync_params) and not self.delay.needs_anchor:
            raise ValueError(
                "control.type='adaptive_rank' reads the spectrum of pseudo-gradients, and "
                "delay.type='average' sends parameters; use control.type='fixed'"
            )
        if not self.compression.is_exact and not self.delay.needs_anchor:
            raise ValueError(
                "delay.type='average' sends the parameters themselves, and compression.type is not "
                "'dense': what coding loses would be lost to the model; leave compression out, or "
                "use delay.type='blocking' with outer_optimizer.type='sgd' and lr 1, which sends "
                "their change"
            )
        if self.schedule.when is not None and self.delay.needs_anchor:
            raise ValueError(
                f"schedule.when={self.schedule.when!r} launches inside the backward, where a "
                "pseudo-gradient is not finished; use delay.type='average' (DreamDDP), or "
                "schedule.type='streaming', which launches at step boundaries"
            )
        if self.schedule.when is not None and self.delay.steps:
            raise ValueError(
                f"delay.steps={self.delay.steps!r}: what a layerwise schedule launches inside the "
                "backward is applied at the end of the same step; use delay.steps=0"
            )

    def _validate_rule(self) -> None:
        """Refuse outer rules that the delay or the penalty cannot work with."""
        outer = self.outer_optimizer
        if self.delay.splits_update and self.staleness.is_active:
            raise ValueError(
                "staleness.type='gap' weighs D by a factor that changes from round to round, and "
                "eager overlap needs a linear rule; use staleness.type='none' or "
                "delay.type='one_step'"
            )
        if self.delay.splits_update and outer.nonlinear_by:
            raise ValueError(
                f"delay.type='eager' splits the outer update into a shared part and a local one, "
                f"which {outer.nonlinear_by} does not allow: use sgd, momentum or nesterov without "
                "clip and scale_by_lr, or delay.type='one_step'"
            )
        if self.staleness.is_active and not outer.has_momentum:
            if not outer.keeps_anchor:
                raise ValueError(
                    "staleness.type='gap' measures how far the anchor has moved, and "
                    "outer_optimizer.type='none' keeps none; leave staleness out"
                )
            raise ValueError(
                "staleness.type='gap' weighs what goes into a momentum: use "
                "outer_optimizer.type='momentum' (momentum 0 is plain sgd) or 'nesterov'"
            )

    def _validate_own_share(self) -> None:
        """Require a codec whose share is known at the launch, where the delay needs it there."""
        compression = self.compression
        if self.encodes_at_launch and not compression.encodes_at_launch:
            names = {kind: name for name, kind in Names("compression", lambda: None).items()}
            name = names.get(type(compression), type(compression).__name__)
            raise ValueError(
                f"compression.type={name!r}: this delay.type ('eager' or 'shift') goes on "
                "from what the wire carries of this cluster, which is not known here before a mean "
                "has come back; use compression.type='dense', 'quantized', 'random_top_k' or, for "
                "'eager', 'top_k', or delay.type='one_step'"
            )
        keeps_residual = getattr(compression, "error_feedback", "none") != "none"
        if self.delay.keeps_unsent and keeps_residual:
            raise ValueError(
                f"compression.error_feedback={getattr(compression, 'error_feedback')!r}: with "  # noqa: B009
                "delay.type='shift' what coding loses stays in the local parameters, and "
                "a residual would send it twice; use error_feedback='none' with "
                "compression.type='quantized' or 'random_top_k', or delay.type='blocking'"
            )
        if compression.needs_feedback and not (keeps_residual or self.delay.keeps_unsent):
            raise ValueError(
                "compression.error_feedback='none' with compression.type='random_top_k' would lose "
                "most of every pseudo-gradient; use error_feedback='fp32', or "
                "delay.type='shift', whose local parameters keep what is not sent"
            )

    def _concerns(self, num_clusters: int | None, num_steps: int | None) -> list[str]:
        """Return what `validate` warns of."""
        interval, tau, found = self.schedule.interval, self.delay.steps, list[str]()
        if num_clusters is not None and tau != "auto" and 2 * tau > interval:
            found.append(
                f"delay.steps={tau} is more than half of schedule.interval={interval}: a delay of "
                "15 of 16 steps has cost 3 % of the loss beyond one of 4 (docs/methods/shift.md); "
                f"use delay.steps <= {interval // 2} and more fragments, which are sent one after "
                "another, or a larger interval"
            )
        rule = self.outer_optimizer.stability_rule
        if rule is None:
            return found
        lr: float = getattr(self.outer_optimizer, "lr")  # noqa: B009 - these rules have one
        momentum: float = getattr(self.outer_optimizer, "momentum", 0.0)
        fresh_share = None if num_clusters is None else self.delay.fresh_share(num_clusters)
        if fresh_share is not None:
            delay_rounds = self.delay.rounds_under_way
            limit = largest_stable_rate(rule, momentum, delay_rounds, fresh_share)
            if lr > _SAFE_SHARE * limit:
                found.append(
                    f"outer_optimizer.lr={lr:g} with {rule} and momentum {momentum:g} is beyond "
                    f"{_SAFE_SHARE:g} of {limit:.3g}, the largest stable rate at this delay where "
                    f"a round reaches the optimum; use lr <= {_SAFE_SHARE * limit:.3g}"
                )
        if num_steps is not None and too_few_rounds(num_steps / self.schedule.interval, momentum):
            found.append(
                f"{num_steps} steps with schedule.interval={self.schedule.interval} are "
                f"{num_steps / self.schedule.interval:.3g} rounds: momentum {momentum:g} needs "
                f"{10 / (1 - momentum):.0f} or more; use a lower momentum or a smaller interval"
            )
        return found
