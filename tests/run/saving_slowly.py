"""Run a script whose outer state takes long to be written, as on a slow disk.

python -m dsx.run saving_slowly.py SCRIPT [arguments]: of what lies below a folder whose name has
SLOW_FROM in it, each rank says so, and writes it so slowly that a test can end it meanwhile. With
SLOW_AGAIN only where a checkpoint of that name is complete, and is written again.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

from dsx.checkpoint import snapshot
from dsx.checkpoint.checksums import MANIFEST, UNFINISHED


def is_first(path: str) -> bool:
    """Whether nothing has the name that what is being written there will get."""
    own = next(p for p in Path(path).parents if p.name.endswith(UNFINISHED))
    return not (own.with_name(own.name.removesuffix(UNFINISHED)) / MANIFEST).exists()


if __name__ == "__main__":
    write_all, slow = snapshot._write_all, os.environ.get("SLOW_FROM", "")
    is_again = os.environ.get("SLOW_AGAIN", "")

    def write(descriptor: int, chunk: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        time.sleep(0.02)
        if slow and slow in path and not (is_again and is_first(path)):
            print(f"{threading.current_thread().name} WRITES {path}", flush=True)
            time.sleep(300)
        write_all(descriptor, chunk)

    snapshot._write_all = write
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    time.sleep(1)  # gloo's thread lets its last tensor go: behind the interpreter's end it aborts
