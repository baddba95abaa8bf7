"""What a member asks a run that goes on, over its secured links (`dsx ctl`, `dsx watch --join`).

May import `config`, `comm` and `telemetry`. No torch: a tool answers at once, on a host without
accelerators.
"""
