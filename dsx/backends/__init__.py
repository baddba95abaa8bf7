"""The old spelling of `dsx.engines`; what was documented of it works with a warning."""
