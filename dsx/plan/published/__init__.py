"""The papers' own models of time, and their tables: `dsx simulate`.

Imports core alone. It has an engine of its own beside plan's timeline: in the papers' tables layers
queue for the link one by one and each forward waits for its own, while dsx's fragments share the
link and are waited for at step boundaries, so neither gives the other's numbers.
"""
