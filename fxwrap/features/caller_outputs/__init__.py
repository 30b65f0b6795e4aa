"""Results in memory of the caller: variants of a program that take a tensor for each result (``run(..., out=...)``).

Bound functions and methods compiled ahead of time ask for them.
"""
