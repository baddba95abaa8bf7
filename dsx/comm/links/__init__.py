"""Secured connections between clusters: keys of members, sockets, frames; never what they mean."""
