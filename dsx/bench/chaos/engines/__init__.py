"""What trains in `dsx bench chaos`: a module per engine, each found by its name.

A module has `warm()`, which imports what its ranks need, before they are forked; and `build(job,
cluster, rank)`, which joins the run and returns an `Engine` (engine.py). Imports of the bench what
a rank is told (job), and no other engine's module.
"""
