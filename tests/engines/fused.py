"""apex's and Transformer Engine's optimizers: theirs where they are installed, else stand-ins."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))  # behind installed ones
