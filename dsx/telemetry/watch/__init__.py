"""A live page of a run (`dsx watch`), from the records that its clusters write."""
