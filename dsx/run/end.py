"""`torch.distributed.destroy_process_group`, which scripts end with: what they train ends before.

Without its cluster's world an engine can apply nothing that is still under way.
"""

from __future__ import annotations

import functools
import sys
from types import ModuleType
from typing import Any

from dsx.run.session import Session


def finish_before_destroy(session: Session, distributed: ModuleType) -> None:
    """Let the whole world go only once what was trained in it is finished, unless it has failed."""
    module: Any = distributed
    original = module.destroy_process_group

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        is_whole = group is None or group is module.group.WORLD
        if is_whole and module.is_initialized() and sys.exc_info()[0] is None:
            session.finish()
        original(group)

    for place in (module, module.distributed_c10d):  # scripts import it from either
        place.destroy_process_group = destroy_process_group
