"""`dsx doctor`: what would stop a run, and what it will do, before it is started; reads only.

Imports plan, config, data's manifests and comm's address; never torch, whose version is read from
its metadata.
"""
