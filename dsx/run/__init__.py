"""`python -m dsx.run SCRIPT`: a script without a line of dsx trains across clusters.

Imports engines and what stands below them. The only room that changes what belongs to others: each
framework's functions are replaced in one file here, in a process that `dsx.run` has started.
"""
