"""What a cluster that comes back costs itself and the others, on a slow line: `dsx bench heal`.

Imports bench's line and testbed, and what of dsx a script of plain PyTorch imports.
"""
