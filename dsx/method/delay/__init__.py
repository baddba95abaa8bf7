"""How late a mean is applied, and how it is merged with the local progress made meanwhile.

Imports core alone.
"""
