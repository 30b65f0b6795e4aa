"""Imported by the process that ``processes`` forks from: torch, fxwrap, and what Inductor does once in a process."""

from __future__ import annotations

import os

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # a pool of processes and its threads would not survive a fork

import torch

import fxwrap.backend  # noqa: F401

with torch.no_grad():
    torch.compile(lambda x: (x @ x).sin() + 1)(torch.ones(4, 4))
torch._dynamo.reset()
