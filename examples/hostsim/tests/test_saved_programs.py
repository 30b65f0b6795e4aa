"""Programs for the device in a file: saved with it, loaded where it is registered, replayed from its graphs."""

import copy
import importlib
import os
import subprocess
import sys
from unittest import mock

import hostsim.inductor
import pytest
import torch

import fxwrap

DEVICE = hostsim.NAME


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        found = self.second(torch.relu(self.first(x)))
        self.seen += found.sum(0)
        return found.softmax(-1)


@pytest.mark.parametrize("compiled", ["object", "source"])
def test_a_program_is_saved_loaded_and_replayed(tmp_path, compiled):
    torch.manual_seed(0)
    model = Counting().eval()
    reference, rows = copy.deepcopy(model), torch.export.Dim("rows", min=2, max=16)
    with hostsim.inductor.register():
        exported = torch.export.export(
            model.to(DEVICE), (torch.randn(4, 8, device=DEVICE),), dynamic_shapes=({0: rows},)
        )
        path = fxwrap.save(tmp_path / "counting.fxw", {"forward": exported}, compile=compiled)
        program = fxwrap.load(path, trust=True)
        program.load_weights({"seen": torch.zeros(8)})
        with torch.no_grad():
            for count in (4, 4, 4, 6, 6, 6, 4):
                x = torch.randn(count, 8)
                torch.testing.assert_close(program.forward(x.to(DEVICE)).cpu(), reference(x), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(program.weights["seen"].cpu(), reference.seen, rtol=1e-5, atol=1e-5)
        assert program["forward"].program.counters.replays >= 3
        with pytest.raises(fxwrap.InputError, match=f"device {DEVICE}"):
            program.forward(torch.randn(4, 8))
    with pytest.raises(fxwrap.StorageError, match="runs them"):
        fxwrap.load(path, trust=True)


class Normed(torch.nn.Module):
    """Without a matrix product: how large one is, the device asks a function of torch's that imports Dynamo."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        found = torch.nn.functional.gelu(self.norm(x))
        self.seen += found.sum(0)
        return found.softmax(-1) + self.seen


TRITON = """
import importlib, sys, torch
from safetensors.torch import load_file
import fxwrap
from triton_interpreter import interpreted_triton

name, path, known = sys.argv[1:]
importlib.import_module(name)
inputs, device = load_file(known), getattr(torch, name)
with interpreted_triton(name, launch=device.launch, current_device=device.current_device) as launches:
    program = fxwrap.load(path, trust=True)
    for step in range(4):
        for count in (4, 6):
            program.load_weights({"seen": torch.zeros(8)})
            found = program.forward(inputs[f"x{count}"].to(name))
            torch.testing.assert_close(found.cpu(), inputs[f"out{count}"], rtol=1e-5, atol=1e-6)
            del found
    device.synchronize()
    counters = program["forward"].program.counters
    assert counters.replays >= 4 and launches, counters
assert not {"torch._inductor", "torch._dynamo"} & sys.modules.keys()
print({launch.kernel for launch in launches})
"""


@pytest.mark.parametrize("compiled", ["object", "source"])
def test_triton_kernels_need_no_inductor_and_no_dynamo(tmp_path, compiled, device):
    """Another process interprets their source, on the device's streams and in its graphs."""
    interpreter = pytest.importorskip("triton_interpreter")
    tensors = pytest.importorskip("safetensors.torch")
    benchmarking = importlib.import_module("torch._inductor.runtime.benchmarking")
    torch.manual_seed(0)
    model, rows = Normed().eval(), torch.export.Dim("rows", min=2, max=16)
    reference, known = copy.deepcopy(model), {}
    with (
        interpreter.interpreted_triton(DEVICE, launch=device.launch, current_device=device.current_device),
        fxwrap.register_device(DEVICE, scheduling="triton", config={"compile_threads": 1}),
        # What the interpreter takes says nothing about a configuration.
        mock.patch.object(benchmarking.benchmarker, "benchmark", lambda fn, *args, **kwargs: fn() or 1.0),
    ):
        torch._inductor.codecache.PyCodeCache.cache_clear()
        x, shapes = torch.randn(4, 8, device=DEVICE), ({0: rows},)
        methods = {"forward": (model.to(DEVICE), (x,), None, shapes)}
        path = fxwrap.save(tmp_path / "counting.fxw", methods, compile=compiled)
    with torch.no_grad():
        for count in (4, 6):
            reference.seen.zero_()
            known[f"x{count}"] = torch.randn(count, 8)
            known[f"out{count}"] = reference(known[f"x{count}"])
    tensors.save_file(known, tmp_path / "known")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRITON, DEVICE, str(path), str(tmp_path / "known")],
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "triton_" in done.stdout
    with pytest.raises(fxwrap.StorageError, match=f"no driver of Triton for {DEVICE}|kernel that Triton loads"):
        fxwrap.load(path, trust=True)
