"""Programs for the device in a file: saved with it, loaded where it is registered, replayed from its graphs."""

import copy

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
