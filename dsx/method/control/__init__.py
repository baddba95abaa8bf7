"""What may change H and the rank while training, from values that are equal everywhere.

Imports core alone.
"""
