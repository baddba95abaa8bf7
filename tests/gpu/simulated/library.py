"""The simulated accelerator's library: whether it can be built here, and building it."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import torch

SOURCE = Path(__file__).parent / "device" / "device.cpp"
RELEASE = (2, 13)  # of torch, whose C++ changes from one to the next


def missing() -> str:
    """Return why it cannot be built here; "" if it can."""
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if torch.version.cuda or torch.version.hip:
        return f"torch {torch.__version__} has an accelerator of its own"
    if release != RELEASE:
        return f"torch {torch.__version__} has another C++ than {RELEASE[0]}.{RELEASE[1]}"
    return "" if compiler() else "there is no C++ compiler, g++ or c++"


def compiler() -> str | None:
    """Return the path of a C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("c++")


def build(folder: Path) -> Path:
    """Return the library's path in `folder`, compiled against this torch; AssertionError if not."""
    from torch.utils.cpp_extension import include_paths, library_paths

    library, command = folder / "simulated_accelerator.so", compiler()
    assert command is not None
    headers = [word for path in include_paths("cpu") for word in ("-isystem", path)]
    libraries = [
        word for path in library_paths("cpu") for word in (f"-L{path}", f"-Wl,-rpath,{path}")
    ]
    done = subprocess.run(
        [command, "-std=c++20", "-O1", "-shared", "-fPIC", *headers, str(SOURCE),
         "-o", str(library), *libraries, "-ltorch_cpu", "-lc10"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-8000:]
    return library
