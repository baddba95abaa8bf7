"""A loop of the script's own over Accelerate: with its DeepSpeed plugin, DDP, FSDP2 or neither.

Each file replaces what it names, once accelerate has been imported by the script.
"""
