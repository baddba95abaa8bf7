"""`python -m dsx.run`: started by a launcher, once per rank."""

from __future__ import annotations

import sys

from dsx.run.script import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
