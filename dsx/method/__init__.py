"""A method is one choice on each axis; a preset is a paper's choices. Pure policies, no state.

Imports compress and core. Declarations need no torch; what they compute with tensors does.

The names in `__all__` are for methods that are written elsewhere (docs/develop/add-a-method.md):
the contract of each axis, what its members are handed, and the choices to combine or to derive
from. Importing the package registers all that ships.
"""

from dsx.compress.base import Compressor, Dense
from dsx.compress.low_rank import LowRank
from dsx.compress.quantized import Quantized
from dsx.compress.random_top_k import RandomTopK
from dsx.compress.top_k import TopK
from dsx.core.types import Fragment, History, ParameterShape, PerTensor, Stage, SyncParams, SyncView
from dsx.method import presets as presets
from dsx.method.control.adaptive_rank import AdaptiveRank
from dsx.method.control.base import Control, Fixed
from dsx.method.delay.average import Average
from dsx.method.delay.base import Blocking, DelayPolicy
from dsx.method.delay.delay_compensation import DelayCompensation
from dsx.method.delay.eager import Eager
from dsx.method.delay.one_step import OneStepDelay
from dsx.method.delay.pullback import Pullback
from dsx.method.delay.shift import Shift
from dsx.method.delay.streaming import StreamingMerge
from dsx.method.fragments import ByLayer, BySize, Fragmenter, WholeModel
from dsx.method.method import Method
from dsx.method.outer_optimizer import (
    SGD,
    Adam,
    Momentum,
    Nesterov,
    NoOuterStep,
    OuterContext,
    OuterOptimizer,
)
from dsx.method.schedule.adaptive_transmission import AdaptiveTransmission
from dsx.method.schedule.base import Schedule
from dsx.method.schedule.layerwise import Layerwise
from dsx.method.schedule.periodic import Periodic, Streaming
from dsx.method.staleness import GapPenalty, NoPenalty, Staleness

__all__ = [
    "SGD",
    "Adam",
    "AdaptiveRank",
    "AdaptiveTransmission",
    "Average",
    "Blocking",
    "ByLayer",
    "BySize",
    "Compressor",
    "Control",
    "DelayCompensation",
    "DelayPolicy",
    "Dense",
    "Eager",
    "Fixed",
    "Fragment",
    "Fragmenter",
    "GapPenalty",
    "History",
    "Layerwise",
    "LowRank",
    "Method",
    "Momentum",
    "Nesterov",
    "NoOuterStep",
    "NoPenalty",
    "OneStepDelay",
    "OuterContext",
    "OuterOptimizer",
    "ParameterShape",
    "PerTensor",
    "Periodic",
    "Pullback",
    "Quantized",
    "RandomTopK",
    "Schedule",
    "Stage",
    "Shift",
    "Staleness",
    "Streaming",
    "StreamingMerge",
    "SyncParams",
    "SyncView",
    "TopK",
    "WholeModel",
]
