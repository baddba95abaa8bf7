"""Telling people what happens in a run: over the web, or by a command of theirs.

`happenings` finds it in what training records, `sender` passes it on, `hooks` knows how.
"""
