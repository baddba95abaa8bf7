"""What this machine has: versions, accelerators, a clock."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from pathlib import Path

import dsx
from dsx.compress.wire.native import library
from dsx.config.schema import DsxConfig
from dsx.core.accelerators import missing_accelerators
from dsx.core.requirements import PACKAGE, installed_version, outside_of_ranges
from dsx.support.doctor.finding import Finding
from dsx.support.environment import gpus

_SHOWN = (
    "torch", "deepspeed", "megatron-core", "transformer-engine", "apex", "transformers",
    "accelerate", "lightning", "numpy",
)  # fmt: skip
_CGROUP = Path("/sys/fs/cgroup")
_TIME_ERROR = 5  # of adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 1024  # more than struct timex has anywhere


def look_at_machine() -> list[Finding]:
    """Return versions, GPUs, what codecs run, and the clock."""
    found = gpus()
    return [*_versions(), _gpus(found), *_accelerators(found), _codecs(), _clock()]


def _versions() -> list[Finding]:
    """Return what is installed in a line, and one for what is not supported."""
    found = {name: version for name in _SHOWN if (version := installed_version(name))}
    python = platform.python_version()
    shown = [f"dsx {dsx.__version__}", f"python {python}"]
    shown += [f"{name} {version}" for name, version in found.items()]
    problems = [*_problems_of(found)]
    if "torch" not in found:
        text = "torch is not installed; pip install 'torch>=2.6', or install dsx-train anew"
        problems.append(Finding("STOP", "versions", text))
    return [Finding("ok", "versions", ", ".join(shown)), *problems]


def _problems_of(found: dict[str, str]) -> list[Finding]:
    """Return what lies outside of the ranges that dsx-train's own metadata has."""
    outside = outside_of_ranges(found)
    if outside is None:
        text = (
            f"{PACKAGE} is imported from a folder and not installed: which versions it supports "
            "is not known here; see pyproject.toml"
        )
        return [Finding("note", "versions", text)]
    problems: list[Finding] = []
    for one in outside:
        if one.is_extra:
            text = f"{one.name} {one.version} is tried; supported is {one.wanted}"
            problems.append(Finding("note", "versions", text))
        else:
            text = f"{one.name} {one.version} is not supported; pip install '{one.wanted}'"
            problems.append(Finding("STOP", "versions", text))
    return problems


def _gpus(found: list[str] | str) -> Finding:
    """Tell of what nvidia-smi sees; torch is not asked, whose import takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    chosen = "" if visible is None else f"; CUDA_VISIBLE_DEVICES={visible!r} chooses among them"
    if isinstance(found, str) or not found:
        text = f"none seen ({found or 'nvidia-smi lists none'}): ranks run where torch puts them"
        return Finding("note", "GPUs", text)
    kinds = {kind: found.count(kind) for kind in found}
    named = "; ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if "+cpu" in (installed_version("torch") or ""):
        text = f"{named}, and torch is a build for the CPU, which sees none; install one for CUDA"
        return Finding("note", "GPUs", text)
    return Finding("ok", "GPUs", f"{named} (name, memory, driver){chosen}")


def _accelerators(found: list[str] | str) -> list[Finding]:
    """Tell what Megatron does without here; it matters on GPUs alone."""
    if isinstance(found, str) or not found or installed_version("megatron-core") is None:
        return []
    return [Finding("note", "accelerators", line) for line in missing_accelerators()]


def _codecs() -> Finding:
    """Tell which kernels codecs run on the CPU."""
    missing = library.unavailable()
    if missing is None:
        return Finding("ok", "codecs", f"native kernels, for {library.instruction_sets()[-1]}")
    text = (
        f"no native kernels: {missing}; codes take some times as long to make. Install dsx-train "
        "anew where a C compiler is (gcc or clang)"
    )
    return Finding("note", "codecs", text)


def gpu_gib() -> float | None:
    """Return the memory of the smallest GPU that nvidia-smi sees, in GiB; None without one."""
    found = gpus()
    if isinstance(found, str):
        return None
    sizes = [int(size[1]) for line in found if (size := re.search(r",\s*(\d+) MiB", line))]
    return min(sizes) / 1024 if sizes else None


def _clock() -> Finding:
    """Tell what the kernel says of its clock; training does not look at one, records do."""
    use = "training does not depend on it; records of several sites are easier to read with it"
    apart = "how far other sites are off is told by `dsx trace` after a run, not from here"
    state = _clock_state()
    if state is None:
        return Finding("note", "clock", f"the system does not tell if it is set by NTP; {apart}")
    if state == _TIME_ERROR:
        return Finding("note", "clock", f"not synchronised (NTP): {use}; start chrony or ntpd")
    return Finding("ok", "clock", f"synchronised (NTP), says the kernel; {apart}")


def _clock_state() -> int | None:
    """Return what adjtimex(2) answers when it is asked and nothing is set; None if it cannot."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        answer: int = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return None
    return answer if answer >= 0 else None


def missing_of(config: DsxConfig) -> list[Finding]:
    """Return what a configuration asks for that is not installed."""
    found: list[Finding] = []
    for name in config.metrics.to:
        packages = ("mlflow", "mlflow-skinny") if name == "mlflow" else (name,)
        if not any(installed_version(package) for package in packages):
            text = (
                f'dsx.metrics.to has "{name}" and {name} is not installed; pip install '
                f'"dsx-train[{name}]", or leave it out'
            )
            found.append(Finding("STOP", "versions", text))
    if config.metrics.prometheus is not None and installed_version("prometheus-client") is None:
        text = (
            "dsx.metrics.prometheus is set and prometheus-client is not installed; pip install "
            '"dsx-train[prometheus]", or leave it out'
        )
        found.append(Finding("STOP", "versions", text))
    if config.metrics.otlp is not None and installed_version("opentelemetry-sdk") is None:
        text = (
            "dsx.metrics.otlp is set and OpenTelemetry's SDK is not installed; pip install "
            '"dsx-train[otel]", or leave it out'
        )
        found.append(Finding("STOP", "versions", text))
    for index, notice in enumerate(config.metrics.notices):
        if notice.url_env is not None and not os.environ.get(notice.url_env, "").strip():
            text = (
                f"dsx.metrics.notices[{index}].url_env={notice.url_env!r} is not in the "
                "environment here; rank 0 of each cluster needs it (`dsx notices` sends a trial)"
            )
            found.append(Finding("note", "notices", text))
    return found


def free_host_bytes() -> tuple[int, int] | None:
    """Return the bytes of host memory that are free, and all there are; None if nobody tells.

    Of a container it is its limit (cgroup v2), where that is the smaller one.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        told = {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines if "kB" in line}
        free, whole = told["MemAvailable"], told["MemTotal"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = (_CGROUP / "memory.current").read_text()
        if limit != "max":
            free, whole = min(free, int(limit) - int(used)), min(whole, int(limit))
    except (OSError, ValueError):
        pass
    return free, whole


def num_gpus() -> int:
    """Return how many GPUs nvidia-smi sees."""
    found = gpus()
    return 0 if isinstance(found, str) else len(found)
