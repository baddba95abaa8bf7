"""Of the machine on which `dsx support` runs: versions, hardware, space; no names, no variables."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import dsx

_RELEVANT = re.compile(
    r"torch.*|deepspeed|megatron.*|transformer[_-]engine.*|apex|flash[_-]attn.*|triton.*|nvidia[_-].*"
    r"|numpy|pydantic.*|safetensors|typer|rich|matplotlib|tensorboard|transformers|accelerate|trl"
    r"|dsx_train|dsx-train|mpi4py|setuptools",
    re.I,
)
_GPU_SECONDS = 10
_NO_GPU = "nvidia-smi does not answer"


def environment_of(folder: Path) -> dict[str, Any]:
    """Return versions, hardware, and what is free where a run's folder lies, as JSON values."""
    return {
        "dsx": dsx.__version__,
        "python": sys.version,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "packages": _packages(),
        "cpus": os.cpu_count(),
        "memory_bytes": _memory(),
        "gpus": gpus(),
        "network_interfaces": interfaces(),
        "disk": shutil.disk_usage(folder)._asdict(),
    }


def _packages() -> dict[str, str]:
    """Return the versions of what matters to a run; others are the user's."""
    found = {
        str(package.metadata["Name"]): package.version
        for package in metadata.distributions()
        if package.metadata["Name"] and _RELEVANT.fullmatch(package.metadata["Name"])
    }
    return dict(sorted(found.items()))


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def gpus() -> list[str] | str:
    """Return name, memory and driver of each GPU; not what is running on them."""
    query = "--query-gpu=name,memory.total,driver_version"
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"],
            capture_output=True, text=True, timeout=_GPU_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return _NO_GPU
    return done.stdout.splitlines()


def interfaces() -> list[str]:
    """Return the names of the network interfaces; none where the system does not tell."""
    try:
        return [name for _, name in socket.if_nameindex()]
    except (OSError, AttributeError):
        return []
