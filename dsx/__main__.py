"""`python -m dsx`: the `dsx` command of this interpreter."""

from __future__ import annotations

from dsx.cli import app

app(prog_name="dsx")
