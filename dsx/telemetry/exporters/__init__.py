"""Sinks of a run's records beside its own files, each through its own library."""
