"""Real training over a real slow line, beside what the planner says: `dsx bench e2e`.

Imports bench's testbed and line, and the rooms below bench.
"""
