"""Warm starts as files have them: in codes, or in fp32, as up to format 10 and of exact factors."""

from __future__ import annotations

from torch import Tensor

from dsx.checkpoint.files import SavedRank
from dsx.compress.owners import CODES, SCALES
from dsx.compress.warm_start import in_codes

_CODES, _SCALES = f"codec.{CODES}", f"codec.{SCALES}"


def saved_with(name: str) -> str:
    """Return the tensor that a slot of a fragment is saved with, or made of: itself, but of scales
    the codes.
    """
    return name.replace(_SCALES, _CODES, 1) if _is_of(name, _SCALES) else name


def read_slot(rank: SavedRank, name: str, like: Tensor) -> Tensor:
    """Return a slot, or one of before a round, to be copied to `like`.

    A warm start that is saved otherwise is translated, to the same values where they are of codes.
    """
    if _is_of(name, _SCALES) and name not in rank:
        return in_codes(rank.read(saved_with(name)))[1]
    saved = rank.read(name)
    if not _is_of(name, _CODES) or saved.is_floating_point() == like.is_floating_point():
        return saved
    if saved.is_floating_point():
        return in_codes(saved)[0]
    return saved * rank.read(name.replace(_CODES, _SCALES, 1))


def _is_of(name: str, kind: str) -> bool:
    return name.removeprefix("before.").startswith(kind)
