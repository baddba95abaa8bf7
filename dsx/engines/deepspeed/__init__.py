"""DeepSpeed: where ZeRO and pipelines keep fp32 masters, and what its checkpoints need.

Imports the parts of engines that all adapters share.
"""
