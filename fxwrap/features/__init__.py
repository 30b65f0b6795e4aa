"""Features: what a user may ask for on top of the line. Each is one folder, which can be deleted.

No module outside of this folder imports one, except ``fxwrap/__init__.py``, whose lines name what users call. A
feature meets the line at the hooks of ARCHITECTURE.md. Its tests are in ``tests/features/NAME``.
"""
