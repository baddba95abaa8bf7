"""Measurements of what dsx does on the machine at hand: `dsx bench`."""
