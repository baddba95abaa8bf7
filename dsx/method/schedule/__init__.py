"""When to send what: schedules map the shared history to the fragments that are due.

Imports core alone.
"""
