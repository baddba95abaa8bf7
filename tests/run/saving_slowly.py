"""Run a script whose outer state takes long to be written, as on a slow disk.

python -m dsx.run saving_slowly.py SCRIPT [arguments]: of what lies below a folder whose name has
SLOW_FROM in it, each rank says so, and writes it so slowly that a test can end it meanwhile.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from typing import Any

from dsx.checkpoint import snapshot

if __name__ == "__main__":
    write_all, slow = snapshot._write_all, os.environ.get("SLOW_FROM", "")

    def write(descriptor: int, chunk: Any) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        time.sleep(0.02)
        if slow and slow in path:
            print(f"WRITES {path}", flush=True)
            time.sleep(300)
        write_all(descriptor, chunk)

    snapshot._write_all = write
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
