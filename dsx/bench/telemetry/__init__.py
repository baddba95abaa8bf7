"""What everything that tells of a run costs its training thread: `dsx bench telemetry`."""
