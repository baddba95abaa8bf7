"""What threads are called in a trace."""

from __future__ import annotations

TRAINING = "training"
TRANSFERS = "dsx-"  # what the names of threads begin with that are not the training's
