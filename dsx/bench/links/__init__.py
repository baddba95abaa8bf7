"""What the transports between clusters give and cost, side by side: `dsx bench links`.

Imports comm and what stands below it, and the testbed.
"""
