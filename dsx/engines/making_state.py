"""Steps by which torch makes an optimizer's state, and that train nothing.

What an optimizer keeps is made by its first step. Where it has kept nothing yet,
`torch.distributed.checkpoint.state_dict` steps it with gradients of zero at a rate of zero, to have
something to save or to load into, and hooks of that step are called as ever: by a script's
`get_optimizer_state_dict`, and by Accelerate and Lightning as they save and load.
"""

from __future__ import annotations

import logging
import sys
from functools import cache
from inspect import currentframe
from types import CodeType

logger = logging.getLogger(__name__)

_MODULE, _FUNCTION = "torch.distributed.checkpoint.state_dict", "_init_optim_state"


def is_making_state() -> bool:
    """Whether this is called, as by a hook, from a step that only makes an optimizer's state."""
    if _MODULE not in sys.modules or (made_by := _makes_state()) is None:
        return False
    frame = currentframe()
    while frame is not None and frame.f_code is not made_by:
        frame = frame.f_back
    return frame is not None


@cache
def _makes_state() -> CodeType | None:
    """Return what of torch takes such steps; None, with a warning, where it has another name."""
    function = getattr(sys.modules[_MODULE], _FUNCTION, None)
    if function is None:
        logger.warning(
            "this torch has no %s.%s: call get_optimizer_state_dict before dsx is attached, or a "
            "step of torch's own that makes an optimizer's state is taken for an inner step",
            _MODULE, _FUNCTION,
        )  # fmt: skip
        return None
    return function.__code__
