"""Training that goes by without dsx is stopped at its first step, not found out at its end.

Every optimizer of torch calls here before a step, until an engine is attached.
"""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsx.run.session import Session


def watch_first_step(session: Session) -> None:
    """Raise RouteNotTaken in the first optimizer step of this process that no engine is behind."""

    def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not session.has_trained:
            session.require_engine(f"the script trains with {type(optimizer).__name__}.step()")
            session.has_trained = True  # the hook stays: torch goes through all of them just now

    register_optimizer_step_pre_hook(before_step)
