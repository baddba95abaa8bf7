"""`dsx bench convergence`: how much each method loses against synchronous data parallel.

Imports examples, and the rooms below it by public names.
"""
