"""Measurements of what dsx does on the machine at hand: `dsx bench`, `dsx net-test`.

Imports any room but the command line. Nothing imports it but that.
Inside: command > paper | torchft > e2e > line > testbed; paper > convergence; the others stand by
themselves.
"""
