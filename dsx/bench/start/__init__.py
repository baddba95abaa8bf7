"""`dsx bench start`: what the start of a run costs, by real processes, and what it would cost.

Ranks are forked from one process that has imported all they need, so that hundreds fit on a host.
What they measure goes to the model in `dsx.plan.start_time`.
"""
