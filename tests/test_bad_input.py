"""Bad input gets a clear error and leaves everything usable."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from conftest import Compiled
from torch._subclasses import FakeTensorMode

import fxwrap
from fxwrap.codegen.inductor import inductor_options
from fxwrap.codegen.torch_versions import registered_operators
from fxwrap.errors import EmissionError, InputError, OptionError, UnsupportedModelError
from fxwrap.host_graph.nodes import is_work, operator_name
from fxwrap.options import Options, parse_options
from fxwrap.plan import Verdict


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"warmupp": 1}, "did you mean 'warmup'"),
        ({"no_such_thing": 1}, "unknown option 'no_such_thing'"),
        ({"warmup": "1"}, "int of at least 0"),
        ({"warmup": True}, "int of at least 0"),
        ({"warmup": -1}, "int of at least 0"),
        ({"strict": 1}, "expected: bool"),
        ({"eager_ops": [1]}, "a string, a fxwrap.EagerRule, or a sequence of these"),
        ({"eager_ops": 3}, "a string, a fxwrap.EagerRule, or a sequence of these"),
        ({"eager_ops": None}, "a string, a fxwrap.EagerRule, or a sequence of these"),
        ({"eager_ops": "aten::nonzer0"}, "did you mean 'aten::nonzero'?"),
        ({"max_recordings": True}, "int of at least 1"),
        ({"max_recordings": 2.0}, "int of at least 1"),
        ({1: 2}, "unknown option 1"),
        ({None: 2}, "unknown option None"),
        ({b"strict": True}, "did you mean 'strict'"),
        ({"capture": "sometimes"}, "one of 'auto', 'always', 'never'"),
        ({"min_launches": 0}, "int of at least 1"),
        ({"peak_budget": 0.5}, "float of at least 1"),
        ({"peak_budget": float("nan")}, "float of at least 1"),
        ({"codegen": int}, "a subclass of fxwrap.FxwrapCodegen"),
        ({"max_autotune": "yes"}, "Inductor's option 'max_autotune'"),
        ({"cpp_wrapper": True}, "cannot be set together with fxwrap"),
    ],
)
def test_wrong_options(compiled: Any, options: dict[str, Any], said: str) -> None:
    f: Compiled = compiled(lambda x: x + 1, options=options)
    with pytest.raises(Exception, match="OptionError") as caught:
        f(torch.ones(2))
    assert said in str(caught.value)
    # The next function compiles.
    g: Compiled = compiled(lambda x: x + 2)
    assert torch.equal(g(torch.ones(2)), torch.full((2,), 3.0))


@pytest.mark.parametrize("options", [["strict"], "strict", ("strict", True), {"strict"}, 3, True])
def test_options_that_are_no_dictionary(options: Any) -> None:
    f = torch.compile(lambda x: x + 1, backend="fxwrap", options=options)
    with pytest.raises(Exception, match="OptionError: wrong type of options") as caught:
        f(torch.ones(2))
    assert "expected: a dictionary" in str(caught.value)
    assert f"got: {options!r} of type {type(options).__name__}" in str(caught.value)


def test_unknown_mode(compiled: Any) -> None:
    with pytest.raises(Exception, match="unknown mode 'fastest'"):
        compiled(lambda x: x + 1, mode="fastest")(torch.ones(2))


def test_modes_and_options_reach_inductor(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fxwrap.codegen.inductor as driver

    seen: dict[str, Any] = {}
    real = driver.compile_fx

    def spy(*args: Any, **kwargs: Any) -> Any:
        seen.update(kwargs["config_patches"])
        return real(*args, **kwargs)

    monkeypatch.setattr(driver, "compile_fx", spy)
    compiled(lambda x: x + 1, mode="max-autotune-no-cudagraphs")(torch.ones(2))
    assert seen["max_autotune"] is True
    seen.clear()
    compiled(lambda x: x + 2, options={"epilogue_fusion": False, "strict": True})(torch.ones(2))
    assert seen["epilogue_fusion"] is False
    # Device graphs are fxwrap's own, whatever the mode says.
    compiled(lambda x: x + 3, mode="reduce-overhead")(torch.ones(2))
    assert "triton.cudagraphs" not in seen


def test_parsing_returns_both_kinds() -> None:
    own, patches = parse_options({"warmup": 2, "epilogue_fusion": False}, inductor_options(), ())
    assert own == Options(warmup=2) and patches == {"epilogue_fusion": False}


def test_two_accelerators() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from fxwrap.codegen.inductor import _devices_in

    with FakeTensorMode():
        tensors = [torch.empty(2, device="meta") for _ in range(3)]
    graph = torch.fx.Graph()
    for position, name in enumerate(("cuda:0", "cuda:1", "cpu")):
        node = graph.placeholder(f"x{position}")
        fake = tensors[position].fake_mode.from_tensor(torch.empty(2, device="meta"))
        fake.fake_device = torch.device(name)
        node.meta["val"] = fake
    graph.output(())
    gm = torch.fx.GraphModule({}, graph)
    with pytest.raises(UnsupportedModelError, match="cuda:0, cuda:1"):
        _devices_in(gm, [])


def _unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Inductor write three lines that no host graph can hold."""
    from fxwrap.codegen.emit.emission import FxwrapCodegen

    real = FxwrapCodegen._generate

    def generate(self: Any, is_inference: bool) -> Any:
        self.lines[:0] = ["while True: pass", "import os", "no_such_function(1)"]
        return real(self, is_inference)

    monkeypatch.setattr(FxwrapCodegen, "_generate", generate)


def test_a_line_that_cannot_be_emitted_falls_back_with_one_warning(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _unreadable(monkeypatch)
    f: Compiled = compiled(lambda x: x.sin() @ x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), x.sin() @ x)
    ours = [w for w in caught if "fxwrap" in str(w.message)]
    assert len(ours) == 1 and "while True" in str(ours[0].message)
    assert len(f.compilation.fallbacks) == 1
    assert any("wrapper line" in reason for reason in fxwrap.stats()["fallbacks"])


def test_strict_names_every_line(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _unreadable(monkeypatch)
    f: Compiled = compiled(lambda x: x.sin() @ x, options={"strict": True})
    with pytest.raises(Exception, match=EmissionError.__name__) as caught:
        f(torch.randn(4, 4))
    for line in ("while True", "import os", "no_such_function"):
        assert line in str(caught.value)


class ReturnsNothing(fxwrap.FxwrapCodegen):
    def compile_graph(self, gm: torch.fx.GraphModule) -> Any:
        super().compile_graph(gm)


@pytest.mark.parametrize("strict", [False, True])
def test_a_compile_graph_that_returns_no_callable(compiled: Any, strict: bool) -> None:
    """The error names the user's class and what it returned; without ``strict`` it is the reason for the fallback."""
    f: Compiled = compiled(lambda x: x.sin() @ x, options={"codegen": ReturnsNothing, "strict": strict})
    x = torch.randn(4, 4)
    if strict:
        with pytest.raises(Exception, match=r"ReturnsNothing.compile_graph[\s\S]*callable[\s\S]*got: None"):
            f(x)
    else:
        with pytest.warns(UserWarning, match="ReturnsNothing.compile_graph"):
            torch.testing.assert_close(f(x), x.sin() @ x)
        assert len(f.compilation.fallbacks) == 1


def test_wrong_number_of_inputs(compiled: Any) -> None:
    f: Compiled = compiled(lambda x: x + 1)
    f(torch.ones(2))
    with pytest.raises(fxwrap.InputError, match="wrong number of inputs"):
        f.program(torch.ones(2), torch.ones(2))


def test_stats_of_a_stranger() -> None:
    with pytest.raises(fxwrap.FxwrapError, match="has no program"):
        fxwrap.stats(lambda x: x)


def test_option_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        parse_options({"warmup": None}, {}, ())
    with pytest.raises(OptionError):
        parse_options({"x": 1}, {}, ())


@torch.library.custom_op("fxwrap_bad_input::lookup", mutates_args=())
def _lookup(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


_lookup.register_fake(torch.empty_like)
_NUMBERS = torch.Tag.nondeterministic_bitwise


@pytest.mark.parametrize(
    ("eager_ops", "remedy"),
    [
        ("aten::nonzer0", "did you mean 'aten::nonzero'?"),
        ("aten.nonzer0", "did you mean 'aten::nonzero'?"),
        ("atn::nonzero", "did you mean 'aten::nonzero'?"),
        ("aten::add.Tensr", "did you mean 'aten::add.Tensor'?"),
        (["aten::mm", "fxwrap_bad_input::lokup"], "did you mean 'fxwrap_bad_input::lookup'?"),
        (["mylib::lookup"], "import what registers it before the first call"),
        ("nolib.lookup_all", "import what registers it before the first call"),
        ("torch.mm", "did you mean 'aten::mm'?"),
        ("mm", "did you mean 'aten::mm'?"),
        ("sinn", "did you mean 'aten::sin'?"),
        ("lokup_", "did you mean 'fxwrap_bad_input::lookup'?"),
        ("", "import what registers it"),
        (" ", "import what registers it"),
        ("aten::*", "an EagerRule with a predicate or tags"),
        ("nolib::*", "an EagerRule with a predicate or tags"),
        (fxwrap.EagerRule("slow", ("aten::mm", "aten::nonzer0")), "did you mean 'aten::nonzero'?"),
        (fxwrap.EagerRule("slow", ("aten::nonzer0",), tags=(_NUMBERS,)), "did you mean 'aten::nonzero'?"),
    ],
)
def test_names_of_no_operator(eager_ops: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match="no operator is called") as caught:
        parse_options({"eager_ops": eager_ops}, {}, registered_operators())
    error = caught.value
    assert "eager_ops" in error.subject and "namespace::name" in error.expected and remedy in error.remedy
    assert error.subject.startswith(f"no operator is called {error.got}")


@pytest.mark.parametrize(
    "name",
    [
        "aten::nonzero",
        "aten.nonzero",
        "aten::nonzero.default",
        "aten::add",
        "aten::add.Tensor",
        "aten.add.Tensor",
        "aten::add.default",  # as any overload is called, too
        "aten::_embedding_bag_forward_only",
        "prims::sin",
        "_c10d_functional::wait_tensor",
        "fxwrap_bad_input::lookup",
        "fxwrap_bad_input.lookup",
        "fxwrap_bad_input::lookup.default",
        # Kernels and functions
        "cpp_fused_sin_0",
        "triton_poi_fused_add_0",
        "mm_0",
        "bias_addmm",
        "what_my_pass_calls",
    ],
)
def test_names_of_operators_and_kernels(name: str) -> None:
    rule = fxwrap.EagerRule("slow", (name,), tags=(_NUMBERS,))
    for given in (name, [name], (rule,), {name, rule}):
        own, _ = parse_options({"eager_ops": given}, {}, registered_operators())
        assert set(own.eager_ops) == (set(given) if not isinstance(given, str) else {given})


def test_rules_without_names_and_rules_of_other_devices() -> None:
    """What is registered on another device's machine only is not known here."""
    rules = (
        fxwrap.EagerRule("slow", tags=(_NUMBERS,)),
        fxwrap.EagerRule("slow", predicate=lambda node: False),
        fxwrap.EagerRule("slow", ("npu_lib::lookup",), devices=("npu",)),
    )
    own, _ = parse_options({"eager_ops": rules}, {}, registered_operators())
    assert own.eager_ops == rules


@pytest.mark.parametrize("operators", ["aten::mm", None, ("aten::mm", 1), torch.ops.aten.mm])
def test_rule_with_wrong_operators(operators: Any) -> None:
    with pytest.raises(OptionError, match="a tuple of names"):
        fxwrap.EagerRule("slow", operators)


def test_whatever_a_program_calls_may_be_listed(compiled: Any) -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        return (_lookup(x.sin()) @ x).cos().cumsum(0)

    f: Compiled = compiled(model)
    x = torch.ones(4, 4)
    f(x)
    names = {operator_name(node) for node in f.program.plan.graph.graph.nodes if is_work(node)}
    assert {"fxwrap_bad_input::lookup", "aten::mm"} <= names and any("::" not in name for name in names)
    g: Compiled = compiled(model, options={"eager_ops": sorted(names)})
    torch.testing.assert_close(g(x), model(x))
    (partition,) = g.program.plan.partitions
    assert partition.verdict is Verdict.EAGER and "listed in eager_ops" in partition.reason


@pytest.mark.parametrize("stage", ["emission", "analysis"])
def test_a_bug_in_a_stage_loses_no_compile(compiled: Any, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    """An unexpected exception is a fallback like any other, and with strict=True an error that says what broke."""
    from fxwrap.codegen.emit import converter
    from fxwrap.passes.analysis import aliasing

    def broken(*_: Any) -> Any:
        raise TypeError("planted bug")

    if stage == "emission":
        monkeypatch.setattr(converter.HostGraphConverter, "_line_KernelCallLine", broken)
    else:
        monkeypatch.setattr(aliasing._Analysis, "run", broken)
    f: Compiled = compiled(lambda x: x.sin() @ x)
    with pytest.warns(UserWarning, match="planted bug"):
        for _ in range(3):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), x.sin() @ x)
    g: Compiled = compiled(lambda x: x.cos() @ x, options={"strict": True})
    with pytest.raises(Exception, match="planted bug"):
        g(torch.randn(4, 4))


def test_a_refused_plan_runs_eagerly_and_says_so(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fxwrap import pipeline
    from fxwrap.errors import PlanError

    def refuse(*_: Any) -> None:
        raise PlanError("plan: planted overlap")

    monkeypatch.setattr(pipeline, "verify_memory", refuse)
    f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
    for _ in range(4):
        x = torch.randn(4, 4)
        torch.testing.assert_close(f(x), (x.sin() @ x).cos() @ x)
    assert f.program.counters.eager == {"warm-up": 1, "plan: planted overlap": 3}
    g: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x, options={"strict": True})
    with pytest.raises(PlanError, match="planted overlap"):
        g(torch.randn(4, 4))


def test_a_partition_that_hardware_refuses_runs_eagerly(compiled: Any) -> None:
    """Capture fails on one partition: the call goes on eagerly from there, and so does every later one."""
    import dataclasses

    from fxwrap.graphs.devices.runtime import using_runtime
    from fxwrap.testing.simulated import SIMULATED, SimulatedGraph

    class Refusing(SimulatedGraph):
        def capture_begin(self) -> None:
            raise RuntimeError("operation not permitted when stream is capturing")

    runtime = dataclasses.replace(SIMULATED, new_graph=lambda pool: Refusing(SIMULATED.simulator, pool))
    with using_runtime(runtime):
        f: Compiled = compiled(lambda x: (x.sin() @ x).cos() @ x)
        for _ in range(4):
            x = torch.randn(4, 4)
            torch.testing.assert_close(f(x), (x.sin() @ x).cos() @ x)
        (event,) = f.program.counters.events
        assert "capture failed" in event and "not permitted" in event
        assert f.program.counters.eager == {"warm-up": 1, event: 2} and not f.program.counters.replays
        g: Compiled = compiled(lambda x: x.cos() @ x, options={"strict": True})
        g(torch.randn(4, 4))
        with pytest.raises(fxwrap.CaptureError, match="not permitted"):
            g(torch.randn(4, 4))


@pytest.mark.parametrize("value", [None, 3])
def test_options_of_inductor_that_take_several_types(value: Any) -> None:
    """As torch.compile with Inductor does."""
    _, patches = parse_options({"autotune_num_choices_displayed": value}, inductor_options(), ())
    assert patches == {"autotune_num_choices_displayed": value}


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_tensor_without_memory(compiled: Any, warmup: int) -> None:
    """As memory estimators pass them: a kernel would end the process."""
    f: Compiled = compiled(lambda x: x.sin() @ x, options={"warmup": warmup})
    x = torch.randn(4, 4)
    for _ in range(3):
        f(x)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, pytest.raises(InputError, match="FakeTensor"):
            f(mode.from_tensor(x))
        torch.testing.assert_close(f(x), x.sin() @ x)
