"""The part of the package mamba_ssm that Megatron's Mamba layers train by, in plain torch.

Its kernels are CUDA's; these are the recurrences that they compute (arXiv:2405.21060).
"""
