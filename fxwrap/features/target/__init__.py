"""Other targets: the decisions for a device that this machine lacks (``fxwrap.explain(..., target="cuda:90")``)."""
