"""What a launch inside the backward asks of an engine of several ranks: refused by name otherwise.

Known from a configuration and a few facts, so that a plan leaves out what training refuses.
"""

from __future__ import annotations

from dsx.core.types import BackwardTrigger


def require_before(when: BackwardTrigger | None, engine: str) -> None:
    """Raise ValueError for `when="after"` on an engine that reduces gradients behind the hooks."""
    if when == "after":
        raise ValueError(
            f"dsx.schedule.when='after' takes a layer's optimizer step inside the backward, where "
            f"{engine} has not reduced its gradients yet; use schedule.when='before', which sends "
            "the parameters as they rest during the backward, or plain PyTorch with "
            "dsx.attach(model, optimizer)"
        )


def require_backwards(given: int, count: int, name: str) -> None:
    """Raise ValueError for `schedule.backwards` that are not the engine's own number, `count`."""
    if given not in (1, count):
        raise ValueError(
            f"dsx.schedule.backwards={given}: this engine takes {count} backward passes per inner "
            f"step ({name}); leave it out, or give {count}"
        )


def require_hooks(when: BackwardTrigger | None, graph: str | None) -> None:
    """Raise ValueError where the backward is captured: `graph` is the setting that says so."""
    if when is not None and graph is not None:
        raise ValueError(
            f"dsx does not serve {graph} of Megatron with dsx.schedule.type='layerwise': a "
            "captured backward calls no hooks; leave it out, or use schedule.type='streaming' with "
            "delay.type='average'"
        )
