"""What only declares, plans or explains starts without torch."""

from __future__ import annotations

import subprocess
import sys

CONFIG = '{"dsx": {"preset": "dilocox", "clusters": {"num_clusters": 2}}}'
DOES = [
    "import dsx; dsx.register; dsx.preset('diloco'); dsx.Method",
    f"import dsx; dsx.load_config({CONFIG})",
    "from dsx.method.choices import PRESETS; [make(2).validate(2, 9, 4) for make in "
    "PRESETS.values()]",
    "import dsx; from dsx.config.flags import block_of_flags; "
    "dsx.load_config(block_of_flags('--dsx-preset co2 --dsx-num-clusters 2'.split()))",
    "from dsx.config.reference import json_schema, markdown; json_schema(); markdown()",
    "from typer.testing import CliRunner as C; from dsx.cli import app; "
    "assert C().invoke(app, ['--help']).exit_code == 0",
]


def test_imports_no_torch() -> None:
    """One after the other in one interpreter; the first that imports it is named."""
    heavy = "{'torch', 'deepspeed', 'megatron'}"
    looks = f"assert not {heavy} & set(sys.modules)"
    program = "\n".join(["import sys", *(f"{does}\n{looks}, {does!r}" for does in DOES)])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
