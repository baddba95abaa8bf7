"""One training run from its start to its end: the handle, early stops, the finished model.

Imports checkpoint, outer, telemetry, comm and what stands below them; no engine.
"""
