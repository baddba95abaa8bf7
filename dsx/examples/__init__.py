"""A whole training run, written as a user would: what `dsx quickstart` trains, and benches, too.

Scripts here use dsx by its public names (and DeepSpeed, as their users do); whatever else of dsx
they import they only print with. Nothing below `bench` imports them.
"""
