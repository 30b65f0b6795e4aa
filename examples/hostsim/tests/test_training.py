"""Forward and backward of small models in one graph, replayed with new inputs: the CPU's losses and gradients."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_equal, capture, name


class Block(torch.nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.embedding = torch.nn.Embedding(11, width)
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.project = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, tokens):
        x = self.embedding(tokens)
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return (x + self.mlp(self.norms[1](x))) @ self.embedding.weight.t()


MODELS = {
    "mlp": (
        lambda: torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5)),
        lambda: torch.randn(6, 8),
    ),
    "convolutions": (
        lambda: torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(4, 4, 3, groups=2),
            torch.nn.Flatten(),
            torch.nn.Linear(16, 5),
        ),
        lambda: torch.randn(3, 2, 8, 8),
    ),
    "transformer": (Block, lambda: torch.randint(0, 11, (2, 7))),
}


def loss_of(model, batch):
    output = model(batch)
    return F.cross_entropy(output.flatten(0, -2), output.detach().flatten(0, -2).argmax(-1))


def clear_gradients(model):
    for parameter in model.parameters():
        parameter.grad = None


@pytest.mark.parametrize("model", MODELS)
def test_forward_and_backward_in_one_graph(mode, device, model):
    make_model, make_batch = MODELS[model]
    reference = make_model()
    trained = copy.deepcopy(reference).to(name())
    batch = make_batch().to(name())

    def step():
        clear_gradients(trained)
        loss = loss_of(trained, batch)
        loss.backward()
        return loss

    graph, loss = capture(step)
    gradients = [parameter.grad for parameter in trained.parameters()]
    for _ in range(3):
        refill = make_batch()
        batch.copy_(refill)
        graph.replay()
        clear_gradients(reference)
        expected = loss_of(reference, refill)
        expected.backward()
        assert_equal(loss, expected, rtol=1e-4, atol=1e-5)
        for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
            assert_equal(gradient, parameter.grad, rtol=1e-4, atol=1e-5)
        for mine, theirs in zip(trained.buffers(), reference.buffers(), strict=True):
            assert_equal(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_a_whole_training_step_in_one_graph(mode, device, optimizer):
    make_model, make_batch = MODELS["mlp"]
    reference = make_model()
    trained = copy.deepcopy(reference).to(name())
    batch = make_batch().to(name())
    capturable = {"capturable": True} if optimizer else {}

    def train(model, data, options):
        adam = torch.optim.SGD(model.parameters(), lr=0.1) if not options else None
        adam = adam or torch.optim.AdamW(model.parameters(), lr=0.1, **options)

        def step():
            adam.zero_grad(set_to_none=True)
            loss = loss_of(model, data)
            loss.backward()
            adam.step()
            return loss

        return step

    data = batch.cpu()
    expected_step = train(reference, data, optimizer)
    step = train(trained, batch, optimizer | capturable)
    side = torch.Stream()
    with side:
        step()  # The optimizer makes its state in the first step.
    side.synchronize()
    expected_step()
    graph, loss = capture(step, stream=side)
    for _ in range(3):
        refill = make_batch()
        batch.copy_(refill), data.copy_(refill)
        graph.replay()
        assert_equal(loss, expected_step(), rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
        assert_equal(mine, theirs, rtol=1e-3, atol=1e-4)


def test_eager_training_in_both_modes(mode, device):
    make_model, make_batch = MODELS["transformer"]
    reference = make_model()
    trained = copy.deepcopy(reference).to(name())
    for _ in range(2):
        batch = make_batch()
        loss_of(reference, batch).backward()
        loss_of(trained, batch.to(name())).backward()
    for mine, theirs in zip(trained.parameters(), reference.parameters(), strict=True):
        assert_equal(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)
