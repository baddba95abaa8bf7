"""The link between clusters, measured without training: `dsx net-test`.

Imports comm, plan and what stands below them.
"""
