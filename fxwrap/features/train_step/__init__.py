"""Training steps: forward, loss, gradients and the optimizer's update as one program (``fxwrap.train_step``)."""
