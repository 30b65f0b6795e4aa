"""Bound functions: compiled code that is called without Dynamo's frame evaluation (``fxwrap.bind``)."""
