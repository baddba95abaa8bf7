"""Measurements of what dsx does on the machine at hand: `dsx bench`, `dsx net-test`.

Imports any room but the command line. Nothing imports it but that.
Inside: command > torchft > e2e > line > testbed; the others stand by themselves.
"""
