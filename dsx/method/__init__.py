"""A method is one choice on each axis; a preset is a paper's choices. Pure policies, no state.

Imports compress and core. Declarations need no torch; what they compute with tensors does.
"""
