"""Where the time of a run goes: recorded by every rank, shown by `dsx trace`."""
