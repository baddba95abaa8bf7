"""Outer state on disk: saved and found again whatever the shards, exported, averaged.

Imports outer, config and what stands below them.
"""
