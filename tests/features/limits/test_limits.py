"""Limits of memory after compiling: another limit, and the picture of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

import fxwrap
from fxwrap.errors import InputError, MemoryLimitError, OptionError


class Wide(nn.Module):
    """Layers whose activations are most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * x.sigmoid()
        return x


def made(**settings: Any) -> Any:
    torch.manual_seed(0)
    model = Wide()
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    return fxwrap.train_step(model, lambda model, x: model(x).square().mean(), optimizer, **settings)


X = torch.linspace(-1, 1, 256 * 16).reshape(256, 16)


def test_another_limit_compiles_nothing_and_changes_no_bit() -> None:
    free, step = made(), made()
    expected, got = [free(X) for _ in range(9)], [step(X) for _ in range(3)]
    (graph,) = fxwrap.report(step).graphs
    (picture,) = fxwrap.report(step).limits()
    for limit in (picture.least, None):
        fxwrap.limit_memory(step, limit)
        got += [step(X) for _ in range(3)]
        plan = graph.program.plan
        assert bool(plan.repeated) == (limit is not None)
        values = (node.meta.get("val") for node in plan.graph.graph.nodes)
        assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"cpu"}, "repeated, too"
    assert all(map(torch.equal, got, expected))
    assert fxwrap.stats(step)["programs"] == 1 and fxwrap.stats(step)["recordings"] == {"first": 3}


def test_a_limit_that_cannot_be_held_says_which_can() -> None:
    step = made()
    before = step(X)
    (picture,) = fxwrap.report(step).limits()
    fxwrap.limit_memory(step, "1kB")
    with pytest.raises(MemoryLimitError) as caught:
        step(X)
    assert caught.value.least == picture.least
    fxwrap.limit_memory(step, caught.value.least)
    assert step(X) < before


def test_the_picture() -> None:
    """Less memory costs more work: peaks fall, and what is moved grows.

    ::

        none          295,940 ######################################## 1.00, 0 nodes again
        259,076       ...     ###############################          1.14, 5 nodes again
    """
    step = made()
    step(X)
    (picture,) = fxwrap.report(step).limits(count=4)
    peaks, moved = [row.peak for row in picture.rows], [row.moved for row in picture.rows]
    assert picture.rows[0].limit is None and picture.rows[0].repeated == 0
    assert len(picture.rows) == 5 and picture.rows[-1].limit == picture.least == peaks[-1]
    assert peaks == sorted(peaks, reverse=True) and moved == sorted(moved)
    assert all(row.peak <= row.limit for row in picture.rows if row.limit is not None)
    assert str(picture).splitlines()[1].endswith("1.00, 0 nodes again")


def test_the_report_lists_what_runs_again() -> None:
    step = made()
    step(X)
    assert "launched again" not in str(fxwrap.report(step))
    (picture,) = fxwrap.report(step).limits(count=1)
    fxwrap.limit_memory(step, picture.least)
    step(X)
    report = fxwrap.report(step)
    (graph,) = report.to_dict()["graphs"]
    assert len(graph["repeated"]) == picture.rows[-1].repeated
    assert f"launched again, within memory_limit: {picture.rows[-1].repeated} nodes" in str(report)
    again = graph["repeated"][0]
    assert again["node"].startswith(f"{again['repeats']}_again") and again["nbytes"] > 0


def test_both_programs_of_micro_batches() -> None:
    step = made(accumulate=2)
    for _ in range(4):
        step(X)
    assert len(fxwrap.report(step).graphs) == 2
    fxwrap.limit_memory(step, max(picture.least for picture in fxwrap.report(step).limits(count=1)))
    for _ in range(4):
        step(X)


def test_the_bill_is_within_the_limit() -> None:
    with torch.no_grad():
        f = torch.compile(Wide(), backend="fxwrap", options={"memory_limit": "1MiB"})
        f(X)
        assert fxwrap.record(f, (X,), dry_run=True).total >= 0
        fxwrap.limit_memory(f, 10)
        with pytest.raises(MemoryLimitError):
            f(X)


def test_what_is_wrong() -> None:
    step = made()
    step(X)
    with pytest.raises(OptionError, match="bytes, or a size such as '6GiB'"):
        fxwrap.limit_memory(step, "much")
    with pytest.raises(InputError, match="a count of at least 1"):
        fxwrap.report(step).limits(count=0)
