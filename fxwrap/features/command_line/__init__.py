"""The command line, ``python -m fxwrap``, and ``fxwrap.doctor``, which says whether an installation is complete."""
