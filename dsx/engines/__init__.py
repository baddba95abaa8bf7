"""Adapters to the engines that train inside a cluster, and the ways in: attach, initialize.

Imports training and what stands below it. The only room that knows DeepSpeed and Megatron.
"""
