"""What each rank of a run will hold, inner and outer: `dsx memory`.

Imports plan's files of models, and outer's account of its buffers.
"""
