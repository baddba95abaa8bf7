"""What helps to find out why a run went wrong, in one file without keys or data: `dsx support`.

Imports checkpoint, telemetry and core.
"""
