"""Contracts and plain types that every room shares; no I/O, and no torch when it is imported.

Imports nothing of dsx.
"""
