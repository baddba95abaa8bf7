"""Adapters to the engines that train inside a cluster."""
