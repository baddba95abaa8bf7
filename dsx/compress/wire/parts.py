"""Where elements lie in a message: codes in order, and behind those of all elements the scales."""

from __future__ import annotations

from dsx.compress.wire.base import Wire
from dsx.compress.wire.group_format import GroupFormat


def has_places(wire: Wire) -> bool:
    """Whether it is known where some elements lie: not in a format of one's own without `form`."""
    return isinstance(getattr(wire, "form", None), GroupFormat) or hasattr(wire, "dtype")


def places_of(wire: Wire, numel: int, start: int, stop: int) -> list[slice]:
    """Return the bytes of elements start..stop in a message of `numel`: those of their own message.

    `start` is a multiple of what the format keeps together, and `stop` is, too, or the end.
    TypeError where it is not known, but for all of them.
    """
    if (start, stop) == (0, numel):
        return [slice(0, wire.num_bytes(numel))]
    if not has_places(wire):
        raise TypeError(f"where elements lie in a message of {wire.name} is not known")
    form = getattr(wire, "form", None)
    if not isinstance(form, GroupFormat):  # a cast: values alone
        return [slice(wire.num_bytes(start), wire.num_bytes(stop))]
    scales = [form.code_bytes(numel) + 2 * form.num_groups(n) for n in (start, stop)]
    return [slice(form.code_bytes(start), form.code_bytes(stop)), slice(*scales)]
