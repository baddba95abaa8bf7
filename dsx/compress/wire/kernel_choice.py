"""Which kernels a codec runs: native ones where they are, else compiled ones where that pays.

`native` are the C kernels of an installation (native/library.py), on the CPU, for vectors of any
length; `compiled` are torch.compile's, which take seconds to a minute on their first call; `eager`
run anywhere. All write the same bits, so each rank chooses for itself. Nothing here needs torch
before a codec is opened.
"""

from __future__ import annotations

import logging

from dsx.compress.wire.base import Kernels
from dsx.compress.wire.native import library
from dsx.core.checks import require_choice

logger = logging.getLogger(__name__)

COMPILE_FROM = 16 * 2**20  # elements

_announced: set[tuple[str, str, str]] = set()


def is_native(kernels: Kernels) -> bool:
    """Whether codecs on the CPU run native kernels here, of what `kernels` says."""
    return kernels in ("auto", "native") and library.unavailable() is None


def choose_kernels(name: str, numel: int, device_type: str, wanted: Kernels) -> str:
    """Return "native", "compiled" or "eager"; logs which and why, once per format and kind.

    Raises ValueError for an unknown choice, RuntimeError for one that cannot be had.
    """
    require_choice("kernels", wanted, Kernels)
    kernels, reason, level = "eager", "asked for", logging.INFO
    missing = _no_native(device_type) if wanted in ("auto", "native") else None
    if wanted == "native" and missing is not None:
        raise RuntimeError(
            f"kernels='native' cannot be had on {device_type}: {missing}; "
            f"{_HELP if device_type == 'cpu' else ''}set kernels to 'auto'"
        )
    if wanted in ("auto", "native") and missing is None:
        kernels, reason = "native", library.instruction_sets()[-1]
    elif wanted == "auto" and numel < COMPILE_FROM:
        reason = f"{numel} elements are fewer than {COMPILE_FROM}, from where compiling pays"
    elif wanted != "eager":
        kernels, reason = _compiled_or_eager(device_type, wanted)
    if missing is not None and device_type == "cpu":
        reason, level = f"native ones are not there: {missing}; {reason}", logging.WARNING
    if wanted == "auto" and kernels == "eager" and numel >= COMPILE_FROM:
        level = logging.WARNING  # slower than it should be
    if (name, device_type, kernels) not in _announced:
        _announced.add((name, device_type, kernels))
        logger.log(level, "%s on %s: %s kernels (%s)", name, device_type, kernels, reason)
    return kernels


_HELP = "install dsx-train anew where a C compiler is (gcc or clang), or "


def _no_native(device_type: str) -> str | None:
    """Return why there are no native kernels for such a device, or None."""
    return library.unavailable() if device_type == "cpu" else "they run on the CPU"


def _compiled_or_eager(device_type: str, wanted: Kernels) -> tuple[str, str]:
    """Return which, and the reason; RuntimeError for "compiled" where nothing compiles."""
    from dsx.compress.wire import compiled

    problem = compiled.unavailable(device_type)
    if problem is None:
        return "compiled", "asked for" if wanted == "compiled" else "a compiler works"
    if wanted == "compiled":
        raise RuntimeError(
            f"kernels='compiled' cannot be had on {device_type}: {problem}; install "
            f"{'Triton' if device_type == 'cuda' else 'g++'} or set kernels to 'eager'"
        )
    return "eager", f"nothing can be compiled on {device_type}: {problem}"
