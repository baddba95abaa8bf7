"""`dsx agent`: looks after one site's launcher: starts it again, passes signals on, leaves in time.

May import `checkpoint` and what is below. A process and signals, no more: what it starts is the
command as it is.
"""
