"""The outer loop of one rank and all its state: launch, transfer, parity check, outer step.

Imports method and what stands below it, and knows engines and networks by core's contracts only.
"""
