"""How clusters meet and move bytes: worlds, rendezvous, process groups, messages, deadlines.

Imports core alone: what the bytes mean is nothing to it.
"""
