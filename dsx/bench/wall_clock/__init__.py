"""One training to its end, three ways: what it reaches by the clock and by bytes on the line.

`dsx bench wall-clock`. Imports bench's e2e, and the rooms below bench.
"""
