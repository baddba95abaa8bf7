"""A method is one choice on each axis: fragments, schedule, control, delay, codec, outer rule.

The axes are those of the papers (see presets.py for the named rows). A method is frozen and
stateless; `validate` refuses combinations that cannot work and says which setting would.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dsx.compress.base import Compressor, Dense
from dsx.control import Control, Fixed
from dsx.delay.base import DelayPolicy
from dsx.fragment import Fragmenter
from dsx.outer_optimizer import OuterOptimizer
from dsx.schedule.periodic import Schedule
from dsx.types import Knobs


@dataclass(frozen=True)
class Method:
    """One choice per axis; `knobs` are the values a controller starts from."""

    fragments: Fragmenter
    schedule: Schedule
    delay: DelayPolicy
    outer_optimizer: OuterOptimizer
    control: Control = field(default_factory=Fixed)
    compressor: Compressor = field(default_factory=Dense)

    @property
    def knobs(self) -> Knobs:
        """The initial H."""
        return Knobs(interval=self.schedule.interval)

    def validate(self) -> None:
        """Raise ValueError, with the value, what is allowed and the nearest setting that works."""
        num_fragments = self.fragments.num_fragments
        if num_fragments < 1:
            raise ValueError(f"fragments.num_fragments={num_fragments} must be at least 1")
        self.schedule.validate(num_fragments)
        self.delay.validate(self.schedule.interval)
        self.outer_optimizer.validate()
