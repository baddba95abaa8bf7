"""What helps to find out why a run goes wrong: `dsx doctor` before it, `dsx support` after it.

Imports checkpoint, plan, telemetry, config, comm's address, data's manifests and core.
"""
