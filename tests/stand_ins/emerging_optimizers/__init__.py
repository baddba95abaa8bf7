"""Stands in for NVIDIA's Emerging-Optimizers 0.1, which Megatron's Muon is made of.

That release is on no index (later ones are, for Python 3.12): where it is installed, or its source
is on PYTHONPATH, it is found before this, and tests run on it. This has the three names that
megatron-core 0.16 and 0.17 import, with the same parameters and the same state, written from the
published rule (Jordan et al. 2024): momentum as a running mean, Nesterov's step from it,
Newton-Schulz of the whole matrix, decoupled decay. Its coefficients are other ones.
"""
