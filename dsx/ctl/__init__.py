"""`dsx ctl`: what a member asks a run that goes on, over its secured links, and tells it to do.

May import `config` and `comm`. No torch: a tool answers at once, on a host without accelerators.
"""
