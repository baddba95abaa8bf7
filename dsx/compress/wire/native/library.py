"""The library of C kernels, which an installation builds of kernels.c: found, asked and called.

It is a shared library beside this file, with no part of Python in it, so one serves every version.
An installation where no C compiler was goes without: then `unavailable` says why, and others are
taken (kernel_choice.py). Which instruction set runs is chosen here, by what the processor has.

Calls are made by ctypes, which lets other threads run meanwhile. Nothing here needs torch.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

from dsx.compress.wire.group_format import GroupFormat, largest_scale

STEM = "kernels"
VERSION = 2  # of dsx_wire_version(): a library of another one is not called
KINDS = ("int8", "int4", "fp8", "fp4_e2m1", "fp4_e3m0", "ternary", "3bit", "2bit", "1bit")


class Form(ctypes.Structure):
    """What the kernels need to know of a format: `Form` of form.h."""

    _fields_ = (
        ("kind", c_int32),
        ("group_size", c_int32),
        ("is_stochastic", c_int32),
        ("top_rank", c_float),
        ("top_value", c_float),
        ("largest_scale", c_float),
        ("levels", c_float * 4),
        ("cuts", c_float * 3),
    )


@functools.cache
def unavailable() -> str | None:
    """Return why the kernels cannot be called here, or None; looked at once."""
    found = _found()
    return found if isinstance(found, str) else None


@functools.cache
def instruction_sets() -> tuple[str, ...]:
    """Return the names of those that the kernels were built for and this processor has, best last.

    RuntimeError without the library.
    """
    return tuple(name for name, _ in _sets())


@functools.cache
def index_of(name: str | None) -> int:
    """Return the library's number of an instruction set; None: of the best.

    ValueError for one that is not among `instruction_sets`.
    """
    known = dict(_sets())
    if name is None:
        return [*known.values()][-1]
    if name not in known:
        raise ValueError(
            f"instruction set {name!r} is not known, or this processor lacks it; "
            f"allowed: {', '.join(known)}"
        )
    return known[name]


def library() -> ctypes.CDLL:
    """Return the loaded library; RuntimeError without one."""
    found = _found()
    if isinstance(found, str):
        raise RuntimeError(f"the native kernels cannot be called: {found}")
    return found


def form_of(name: str, form: GroupFormat) -> Form:
    """Return the format of that name, one of `KINDS`, as the kernels know it."""
    levels = form.levels
    cuts = [(below + above) / 2 for below, above in zip(levels, levels[1:], strict=False)]
    return Form(
        KINDS.index(name),
        form.group_size,
        form.is_stochastic,
        form.top_rank,
        form.top_value,
        largest_scale(form.top_value),
        (c_float * 4)(*levels),
        (c_float * 3)(*cuts),
    )


@functools.cache
def _found() -> ctypes.CDLL | str:
    """Load the library, or say why that cannot be."""
    folder = Path(__file__).parent
    files = [folder / f"{STEM}{suffix}" for suffix in EXTENSION_SUFFIXES]
    there = [file for file in files if file.exists()]
    if not there:
        return "they were not built: no C compiler was there at installation, or it failed"
    try:
        loaded = ctypes.CDLL(str(there[0]))
    except OSError as error:
        return f"{there[0].name} cannot be loaded: {error}"
    if not hasattr(loaded, "dsx_wire_version") or (
        (loaded.dsx_wire_version(), loaded.dsx_wire_form_bytes()) != (VERSION, ctypes.sizeof(Form))
    ):
        return f"{there[0].name} is of another version of dsx; install dsx anew"
    loaded.dsx_wire_set.restype = c_char_p
    loaded.dsx_wire_encode.argtypes = (
        *(c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_uint32, c_uint32),
    )
    loaded.dsx_wire_encode.restype = None
    loaded.dsx_wire_decode.argtypes = (c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int)
    loaded.dsx_wire_decode.restype = None
    loaded.dsx_step_momentum.argtypes = (
        *(c_int, c_void_p, c_void_p, c_void_p, c_int64, c_float, c_float, c_int),
    )
    loaded.dsx_step_momentum.restype = None
    loaded.dsx_step_blend.argtypes = (c_int, c_void_p, c_void_p, c_int64, c_float, c_float)
    loaded.dsx_step_blend.restype = None
    loaded.dsx_step_difference.argtypes = (c_int, c_void_p, c_void_p, c_void_p, c_int64)
    loaded.dsx_step_difference.restype = None
    if not loaded.dsx_wire_has(0):
        return f"this processor lacks {loaded.dsx_wire_set(0).decode()}"
    return loaded


def _sets() -> list[tuple[str, int]]:
    known, found = library(), list[tuple[str, int]]()
    index = 0
    while (name := known.dsx_wire_set(index)) is not None:
        if known.dsx_wire_has(index):
            found.append((name.decode(), index))
        index += 1
    return found
