"""torch's gloo devices, on an interface or on the host name's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def gloo_device(interface: str | None, is_lazy: bool) -> Any:
    """Return a device that connects two members when one has something for the other, or at once.

    An older torch knows no such choice: there all are connected at once.
    """
    make: Any = dist.ProcessGroupGloo
    named = {} if interface is None else {"interface": interface}
    make = make.create_default_device if interface is None else make.create_device
    try:
        return make(**named, lazy_init=is_lazy)
    except TypeError:
        return make(**named)
