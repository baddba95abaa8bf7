"""`dsx bench chaos --against torchft`: the faults that a run of dsx has had, in a run of torchft.

Imports what stands below bench.chaos.show. `check` reads what the processes have written of
themselves, and nothing of torchft.
"""
