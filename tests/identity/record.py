"""Write what one tree of dsx produces to a JSON file; see this package's docstring.

    PYTHONPATH=TREE python tests/identity/record.py --out FILE [--only in_process,gloo,...]

Exits with 1 where a resumed run is not the uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

PARTS = {
    "in_process": "in_process",
    "gloo": "gloo",
    "deepspeed": "deepspeed_zero2",
    "megatron": "megatron_tp2",
}


def main() -> int:
    arguments = _arguments()
    os.environ["OMP_NUM_THREADS"] = "1"
    # last, so that nothing of another tree is hidden, whose own `tests` may be on the path, too
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import torch

    import dsx

    cpu = torch.backends.cpu.get_cpu_capability()
    about = {"tree": str(Path(dsx.__file__).parents[1]), "torch": torch.__version__, "cpu": cpu}
    print(f"recording {about['tree']}", flush=True)
    evidence: dict[str, Any] = {"about": about, "parts": {}}
    unequal = 0
    for part in arguments.only:
        workspace = tempfile.mkdtemp(prefix=f"dsx-identity-{part}-")
        started = time.monotonic()
        try:
            runs = import_module(f"identity.{PARTS[part]}").record(workspace)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)
        evidence["parts"][part] = json.loads(json.dumps(runs))
        unequal += _show_resumed(part, runs)
        arguments.out.write_text(json.dumps(evidence, indent=1))
        print(f"{part}: {len(runs)} runs in {time.monotonic() - started:.0f} s", flush=True)
    return int(unequal > 0)


def _show_resumed(part: str, runs: dict[str, Any]) -> int:
    """Print how resumed runs differ from uninterrupted ones; return how many do."""
    unequal = 0
    for name, run in runs.items():
        found = run.get("resumed", {}).get("values", {}).get("not as uninterrupted", [])
        unequal += bool(found)
        for difference in found:
            print(f"{part}, {name}, resumed: {difference}", flush=True)
    return unequal


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Record what a tree of dsx produces.")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = [part for part in arguments.only if part not in PARTS]
    if unknown:
        parser.error(f"--only {','.join(unknown)} is not known; allowed: {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
