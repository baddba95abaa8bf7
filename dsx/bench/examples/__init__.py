"""`dsx bench examples`: unmodified scripts of other projects, run across clusters and without dsx.

Imports what stands below bench, and of bench nothing. The folder `inside` is no package: its files
are imported in the ranks of a row, by PYTHONPATH, and import nothing of dsx.
"""
