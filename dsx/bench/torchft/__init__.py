"""`dsx bench torchft`: torchft's DiLoCo beside dsx's, on the same slow line of this host.

Imports bench's e2e and testbed, and what stands below bench.
"""
