"""Results in memory of the caller: variants of a program that take a tensor for each result (``run(..., out=...)``).

Methods compiled ahead of time ask for them.
"""
