"""The named methods: each preset is one row of choices, with defaults that were found stable.

| preset | paper | row |
| --- | --- | --- |
| local_sgd | LocalSGD, arXiv:1805.09767 | whole model every H, blocking, anchor = mean |
| slowmo | SlowMo, arXiv:1910.00643 | whole model every H, blocking, heavy ball |
| diloco | DiLoCo, arXiv:2311.08105 | whole model every H, blocking, Nesterov |
| streaming_diloco | Streaming DiLoCo, arXiv:2501.18512 | P fragments spread over H, overlap tau |

Outer rates: a momentum of 0.9 needs many rounds (`rounds * (1 - momentum) >= 10`); for short runs
use lr 0.7 with momentum 0.5. Any axis can be overridden in the "dsx" block.
"""

from __future__ import annotations

from collections.abc import Callable

from dsx.delay.base import Replace
from dsx.delay.streaming import Blend
from dsx.fragment import ByLayer, WholeModel
from dsx.method import Method
from dsx.outer_optimizer import SGD, Momentum, Nesterov
from dsx.schedule.periodic import Periodic, Streaming


def local_sgd() -> Method:
    """Average the parameters every H steps: SGD with rate 1 makes the anchor their mean."""
    return Method(WholeModel(), Periodic(interval=100), Replace(), SGD(lr=1.0))


def slowmo() -> Method:
    """Heavy-ball momentum on the averaged progress of H steps."""
    return Method(WholeModel(), Periodic(interval=100), Replace(), Momentum(lr=1.0, momentum=0.5))


def diloco() -> Method:
    """Nesterov momentum on the averaged progress of H steps."""
    return Method(WholeModel(), Periodic(interval=100), Replace(), Nesterov(lr=0.7, momentum=0.9))


def streaming_diloco() -> Method:
    """Strided fragments of layers at fixed offsets within H, each overlapped by tau steps."""
    return Method(
        ByLayer(num_fragments=4),
        Streaming(interval=100),
        Blend(steps=2, alpha=0.5),
        Nesterov(lr=0.4, momentum=0.9),
    )


PRESETS: dict[str, Callable[[], Method]] = {
    "local_sgd": local_sgd,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
}
