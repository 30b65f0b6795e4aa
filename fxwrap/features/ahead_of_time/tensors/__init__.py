"""Tensors of methods compiled ahead of time: which there are, under which names, and as a file holds them."""
