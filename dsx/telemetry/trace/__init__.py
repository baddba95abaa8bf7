"""Where the time of a run goes: recorded by every rank, shown by `dsx trace`.

Imports core and telemetry's files of JSON lines.
"""
