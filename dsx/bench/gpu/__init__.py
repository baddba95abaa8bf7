"""`dsx bench gpu`: what the CPU cannot show, on a machine with one GPU or several.

Every preset and engine trains on CUDA, NCCL inside a cluster and host links between two of them;
what synchronises the device, what memory is taken, and what dsx costs the training thread is
counted there. Imports examples, and the rooms below it by public names.
"""
