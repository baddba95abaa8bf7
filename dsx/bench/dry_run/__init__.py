"""A run built without its machines: `dsx dry-run`.

The engine's own objects, on tensors without memory and process groups without processes. Imports
engines and plan; what torch needs is imported once a rank is built.
"""
