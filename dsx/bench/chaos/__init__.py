"""`dsx bench chaos`: clusters of real processes train while processes and lines fail on purpose.

Imports what stands below bench, and of bench megatron_on_cpu alone. `check` reads what the ranks
have written of themselves, and nothing of dsx: it is not to believe what it checks.
"""
