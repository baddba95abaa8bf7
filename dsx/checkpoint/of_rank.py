"""What one rank says of its outer state beside the tensors: where elements lie, what it keeps."""

from __future__ import annotations

from typing import Any

from dsx.checkpoint.files import layout
from dsx.checkpoint.warm_starts import saved_with
from dsx.core.types import Fragment
from dsx.outer.loop import OuterLoop


def layouts(loop: OuterLoop) -> dict[str, Any]:
    """Return where elements lie on this rank: as masters, and as they travel."""
    return {
        "layout": layout(loop.adapter.fragments),
        "wire": layout([gather.wire for gather in loop.matrix_gathers]),
    }


def errors(loop: OuterLoop, fragment: Fragment) -> dict[str, Any]:
    """Return which elements on the wire the residuals of a fragment are of."""
    return {
        name: {
            "start": error.start,
            "stop": error.stop,
            "storage": error.residual.storage,
            "is_of_mean": error.is_of_mean,
        }
        for name, error in loop.state.channels[fragment.id].codec.errors.items()
    }


def kinds(loop: OuterLoop) -> dict[str, Any]:
    """Return what a method keeps, whatever the layout, as JSON values."""
    slots = [list(s.named()) for s in loop.state.slots]
    parameters = [
        [[p.name, list(p.shape)] for p in fragment] for fragment in loop.adapter.fragment_parameters
    ]
    return {
        "rounds_under_way": loop.method.delay.rounds_under_way,
        "buffers": slots,
        "keeps an anchor": loop.method.outer_optimizer.keeps_anchor,
        "exports": loop.method.delay.export,
        "measures": loop.method.control.sideband_numel(loop.method.sync_params),
        "parameters": parameters,
        "stage": [loop.adapter.stage.index, loop.adapter.stage.count],
    }


def state_shape(loop: OuterLoop) -> dict[str, Any]:
    """Return the sizes of what this rank keeps, as JSON values; of warm starts but the codes', as
    of values before format 11.
    """
    fragments = range(len(loop.adapter.fragments))
    buffers = {
        f"{name}/{p}": tensor.numel() for p in fragments for name, tensor in
        sorted(loop.state.named_state(p).items()) if saved_with(name) == name
    }  # fmt: skip
    return {
        "rounds_under_way": loop.method.delay.rounds_under_way,
        "numbers beside a transfer": [loop.state.sideband_numel(p) for p in fragments],
        "buffers": buffers,
    }
