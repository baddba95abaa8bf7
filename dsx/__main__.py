"""`python -m dsx`: the `dsx` command of this interpreter."""

from __future__ import annotations

from dsx.cli import app

if __name__ == "__main__":
    app(prog_name="dsx")
