"""The loss of each engine and layout that dsx serves, beside that of the engine alone.

A combination (combinations.py) trains a tiny GPT four times: the engine alone, with dsx and one
cluster, which has to come to the same bits, and in two clusters by two methods. Its ranks are
forked from a process that has imported the engine.
"""
