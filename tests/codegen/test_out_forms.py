"""Functional operators write into buffers that the plan owns, where that gives the same numbers and saves memory.

::

    buf2 = aten.topk(buf0, 2)                    buf2, buf3 = allocate ..., allocate ...
    launch kernel(buf2[0])                ->     aten.topk.values(buf0, 2, values=buf2, indices=buf3)
                                                 launch kernel(buf2)
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

import fxwrap
from fxwrap.codegen.emit.converter import HostGraphConverter
from fxwrap.codegen.emit.out_forms import OutForm, out_form
from fxwrap.host_graph.listing import list_graph
from fxwrap.host_graph.storages import Origin

aten = torch.ops.aten

# -- which operators ------------------------------------------------------------------------------------


def test_a_structured_operator_has_a_form_on_every_device() -> None:
    """Torch makes the functional form of it: allocate, then run the out= form."""
    for device in ("cpu", "cuda", "privateuseone"):
        assert out_form(aten.topk.default, device) == OutForm(aten.topk.values, ("values", "indices"))


@pytest.mark.parametrize(
    "overload, reason",
    [
        (aten.convolution.default, "its out= form computes elsewhere and copies"),  # made by torch
        (aten._fft_r2c.default, "its out= form computes elsewhere and copies"),  # measured
        (aten._scaled_dot_product_flash_attention_for_cpu.default, "it has no out= form"),
        (aten.slice.Tensor, "it writes or returns an argument"),
        (aten.unbind_copy.int, "it does not return a fixed number of tensors"),
    ],
)
def test_operators_that_allocate_by_themselves(overload: Any, reason: str) -> None:
    assert out_form(overload, "cpu") == reason


class _Comparing(TorchDispatchMode):
    """Runs every operator that has a form in both forms; notes what differs and what saves no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.compared: set[Any] = set()
        self.different: set[str] = set()
        self.wasteful: set[str] = set()
        self.resized: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        form = out_form(func, "cpu")
        if not isinstance(form, OutForm) or torch.Tag.dynamic_output_shape in func.tags:
            return func(*args, **kwargs)
        before = torch.get_rng_state()
        results, functional = _with_bytes(lambda: func(*args, **kwargs))
        after = torch.get_rng_state()
        values = results if isinstance(results, (tuple, list)) else (results,)
        if any(value.layout is not torch.strided or value.is_conj() or value.is_neg() for value in values):
            return results
        outs = [torch.empty_strided(v.size(), v.stride(), dtype=v.dtype) for v in values]
        own = sum(out.untyped_storage().nbytes() for out in outs)
        torch.set_rng_state(before)
        given = dict(zip(form.results, outs, strict=True))
        _, with_out = _with_bytes(lambda: form.overload(*args, **kwargs, **given))
        # Memory that the plan owns cannot grow, not even for a while.
        if own != sum(out.untyped_storage().nbytes() for out in outs):
            self.resized.add(str(func))
        self.compared.add(func)
        same = all(torch.equal(_bits(out), _bits(value)) for out, value in zip(outs, values, strict=True))
        if not same or not torch.equal(torch.get_rng_state(), after):
            self.different.add(str(func))
        if own > 64 and with_out + own > functional + 64:  # scalars do not count
            self.wasteful.add(str(func))
        return results


def _with_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        results = call()
    events = profile.profiler.kineto_results.events()
    return results, sum(max(event.nbytes(), 0) for event in events if event.name() == "[memory]")


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [100, pytest.param(None, marks=pytest.mark.sweep)])
def test_both_forms_of_torch_s_own_operators_agree_and_out_saves_memory(count: int | None) -> None:
    """So many entries of torch's table, seeded, or all of them."""
    from torch.testing._internal.common_methods_invocations import op_db

    comparing = _Comparing()
    entries = [op for op in op_db if torch.float32 in op.supported_dtypes("cpu")]
    random.Random(0).shuffle(entries)
    for op in entries[:count]:
        try:
            samples = list(op.sample_inputs("cpu", torch.float32))[:3]
        except Exception:
            continue
        for sample in samples:
            with comparing:
                try:
                    op.op(sample.input, *sample.args, **sample.kwargs)
                except Exception as error:  # an entry that does not run on this machine
                    assert "out" not in str(error), op.name
    assert len(comparing.compared) > 50
    assert not comparing.different
    assert not comparing.wasteful
    assert not comparing.resized


# -- whole programs -------------------------------------------------------------------------------------


def _topk(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    values, indices = torch.topk(x @ x.t(), 2)
    return values * 2, indices + 1


def test_results_are_planned(compiled: Any) -> None:
    ours: Compiled = compiled(lambda x: torch.linalg.qr(x @ x.t())[0] @ x)
    theirs = inductor(lambda x: torch.linalg.qr(x @ x.t())[0] @ x)
    for _ in range(4):
        x = torch.randn(4, 4)
        assert_same(ours(x), theirs(x))
    plan = ours.program.plan
    assert (
        list_graph(plan.graph)
        == """\
x: float32[4, 4] on cpu (arg0_1)
buf0 = allocate (4, 4), strides (4, 1), float32, cpu
reinterpret = reinterpret(x, (4, 4), (1, 4), 0)
aten.mm.out(x, reinterpret, out=buf0)
buf2 = allocate (4, 4), strides (1, 4), float32, cpu
empty_strided_2 = allocate (4, 4), strides (1, 4), float32, cpu
aten.linalg_qr.out(buf0, Q=buf2, R=empty_strided_2)
buf4 = allocate (4, 4), strides (4, 1), float32, cpu
aten.mm.out(buf2, x, out=buf4)
return buf4"""
    )
    assert all(storage.origin is not Origin.EXTERN for storage in plan.facts.storages)
    assert ours.program.counters.replays == 2


def _sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.slice_copy(x * 2, 0, 1, 3) @ x[:4, :3]


def _split(x: torch.Tensor) -> list[torch.Tensor]:
    return [part @ part.t() for part in torch.split_copy(x * 2, 2)]


def _complex(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(torch.select_copy(x * 2j, 0, 1) * (1 + 1j))


@pytest.mark.parametrize("function", [_sliced, _split, _complex])
def test_copies_of_parts(compiled: Any, function: Callable[..., Any]) -> None:
    ours: Compiled = compiled(function)
    theirs = inductor(function)
    for _ in range(4):
        x = torch.randn(4, 4)
        assert_same(ours(x), theirs(x))
    assert "_copy" in list_graph(ours.program.plan.graph)
    assert ours.program.counters.replays == 2


def test_sizes_may_vary(compiled: Any) -> None:
    ours: Compiled = compiled(_topk, dynamic=True)
    theirs = inductor(_topk, dynamic=True)
    for n in (4, 5, 4, 5, 4, 5):
        x = torch.randn(n, n + 1)
        assert_same(ours(x), theirs(x))
    assert all(storage.origin is not Origin.EXTERN for storage in ours.program.plan.facts.storages)
    assert ours.program.counters.replays > 0


def test_what_stays_outside_the_plan_is_named_with_its_reason() -> None:
    explanation = fxwrap.explain(lambda x: torch.fft.fft(x * 2), torch.randn(8))
    (graph,) = explanation.to_dict()["graphs"]
    reason = "its out= form computes elsewhere and copies"
    assert list(graph["outside_the_plan"].values()) == [f"aten::_fft_r2c: {reason}"]
    assert f"aten::_fft_r2c: {reason}" in str(explanation)


def test_a_size_that_data_decides_stays_outside() -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        explanation = fxwrap.explain(lambda x: torch.nonzero(x > 0).sum(0), torch.randn(8))
    (graph,) = explanation.to_dict()["graphs"]
    assert "aten::nonzero: its result's size is data-dependent" in graph["outside_the_plan"].values()


def test_results_that_inductor_predicts_otherwise_stay_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a fake value is wrong. Memory of its size would be too small for what the operator writes."""
    describe = HostGraphConverter._describe_call

    def wrongly(self: HostGraphConverter, node: Node, function: Any) -> None:
        describe(self, node, function)
        if node.target is aten.topk.default:
            node.meta["val"] = tuple(value[:1] for value in node.meta["val"])

    monkeypatch.setattr(HostGraphConverter, "_describe_call", wrongly)
    explanation = fxwrap.explain(_topk, torch.randn(4, 4))
    (graph,) = explanation.to_dict()["graphs"]
    assert set(graph["outside_the_plan"].values()) == {"aten::topk: Inductor predicts no results like these"}


@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="torch 2.11 knows no custom out= forms")
def test_a_custom_out_form_must_fill_what_its_fake_kernel_predicts() -> None:
    """Inductor returns the tensor that the operator has resized, with numbers that no kernel has written."""
    with torch.library._scoped_library("test_out_forms", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)", tags=[torch.Tag.out])

        def into(x: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
            return out.resize_(2 * x.size(0)).copy_(torch.cat([x, x]))

        library.impl("twice", lambda x: torch.cat([x, x]), "CPU")
        library.impl("twice.out", into, "CPU")
        torch.library.register_fake("test_out_forms::twice", torch.empty_like, lib=library)
        f = Compiled(lambda x: torch.ops.test_out_forms.twice(x.sin()).cumsum(0))
        for _ in range(3):
            with pytest.raises(AssertionError, match=r"size 8==4[^$]*twice"):
                f(torch.randn(4))
