"""The papers' own models of time, and their tables: `dsx simulate`.

Imports plan's scenarios and closed forms.
"""
