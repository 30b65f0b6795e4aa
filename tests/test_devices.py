"""fxwrap.register_device, on devices that every torch has: what is entered, what is taken back, what it refuses.

Whole devices are in examples/: hostsim and minimal. A process has one out-of-tree device, so that they
are tested in processes of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import processes
import pytest
import torch
from conftest import assert_same, inductor
from torch._dynamo import device_interface as interfaces
from torch._inductor.codegen import common
from torch.fx import Node

import fxwrap
from fxwrap.codegen.devices.registration import _interface, _OpOverrides
from fxwrap.codegen.torch_versions import CPP_DEVICE_NAMES
from fxwrap.devices import device_function, device_support, registered_devices
from fxwrap.host_graph.nodes import kernel_of

ROOT = Path(__file__).resolve().parent.parent


def run_directly(function: Any, *args: Any) -> None:
    function(*args)


def model(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() @ x).cos().softmax(-1)


def tables() -> list[dict[str, Any]]:
    return [
        dict(registered_devices()),
        dict(interfaces.device_interfaces),
        dict(common.device_op_overrides_dict),
        dict(common.device_codegens),
        dict(CPP_DEVICE_NAMES),
    ]


def test_everything_is_taken_back() -> None:
    common.init_backend_registration()
    common.get_device_op_overrides("cpu")
    interfaces.get_registered_device_interfaces()
    before = tables()
    handle = fxwrap.register_device("mtia", scheduling="cpp", kernels=[fxwrap.cpp_kernels(run_directly)])
    assert device_support("mtia").kernels and before != tables()
    assert "mtia" in repr(handle)
    handle.unregister()
    handle.unregister()
    assert tables() == before
    with fxwrap.register_device("cpu"), fxwrap.register_device("mtia"):
        pass
    assert tables() == before


def test_nothing_leaks_into_other_devices() -> None:
    """The settings that a device needs reach graphs with that device in them, and no other."""
    seen = []

    class Codegen(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: torch.fx.GraphModule) -> Any:
            seen.append(torch._inductor.config.loop_ordering_after_fusion)
            return super().compile_graph(gm)

    usual = torch._inductor.config.loop_ordering_after_fusion
    with fxwrap.register_device("mtia", scheduling="cpp", kernels=[fxwrap.cpp_kernels(run_directly)]):
        torch.compile(model, backend="fxwrap", options={"codegen": Codegen})(torch.randn(4, 4))
    assert seen == [usual]


def test_a_kind_of_kernels_of_ones_own(compiled: Any) -> None:
    """What a vendor does: every launch of a compiled kernel goes through the device's own runtime."""
    launched = []

    def launch(function: Any, *args: Any) -> None:
        launched.append(function)
        function(*args)

    x = torch.randn(8, 8)
    expected = inductor(lambda x: model(x))(x)
    with fxwrap.register_device("cpu", kernels=[fxwrap.cpp_kernels(launch)]):
        f = compiled(model)
        for _ in range(3):
            assert_same(f(x), expected)
    assert f.program.counters.replays == 1
    launches = sum(partition.launches for partition in f.program.plan.partitions)
    assert len(launched) == 3 * launches
    torch._dynamo.reset()
    launched.clear()
    compiled(model)(x)
    assert not launched


def test_kernels_with_a_loader_and_a_launcher_of_their_own(compiled: Any) -> None:
    """A kind sees what the scheduling wrote, says what a kernel writes, and loads it once."""
    loaded: list[fxwrap.KernelCall] = []

    def load(call: fxwrap.KernelCall) -> Any:
        loaded.append(call)
        return lambda *args: call.definition(*args)

    def everything(call: fxwrap.KernelCall) -> list[int]:
        assert call.arg_types is not None
        return [i for i, ctype in enumerate(call.arg_types) if "*" in ctype]

    def only_reductions(call: fxwrap.KernelCall) -> bool:
        return "softmax" in call.name

    kind = fxwrap.KernelKind("mine", load, only_reductions, everything)
    x = torch.randn(8, 8)
    expected = inductor(lambda x: model(x))(x)
    with fxwrap.register_device("cpu", kernels=[kind]):
        f = compiled(model)
        for _ in range(4):
            assert_same(f(x), expected)
    assert f.program.counters.replays == 2
    kernels = {k.name: k for n in f.program.plan.schedule if (k := kernel_of(n)) is not None}
    languages = {name: kernel.language for name, kernel in kernels.items()}
    assert set(languages.values()) == {"mine", "cpp"}  # the kinds of the device itself are asked after one's own
    (call,) = loaded
    assert languages[call.name] == "mine" and call.device == torch.device("cpu") and "void" in call.source
    assert len(kernels[call.name].writes) == sum("*" in ctype for ctype in call.arg_types)


def test_operators_that_a_device_cannot_capture(compiled: Any) -> None:
    def reason(node: Node) -> str | None:
        return "this device has no mm in its graphs" if "mm" in str(node.target) else None

    rule = fxwrap.EagerRule("not on this device", predicate=reason)
    x = torch.randn(8, 8)
    expected = inductor(lambda x: model(x))(x)
    with fxwrap.register_device("cpu", eager_ops=[rule]):
        f = compiled(model)
        for _ in range(3):
            assert_same(f(x), expected)
    captured, eager, rest = f.program.plan.partitions
    assert [captured.reason, rest.reason] == ["", ""]
    assert "aten::mm: this device has no mm in its graphs" in eager.reason


def test_a_device_graph_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """``device_graph`` is asked where the device would have been captured by the unified graph."""
    from fxwrap.errors import CaptureError
    from fxwrap.graphs.devices.runtime import runtime_for

    asked = []

    class Graph:
        def __init__(self, pool: Any) -> None:
            asked.append(pool)

    monkeypatch.setattr(torch.mtia, "graph_pool_handle", lambda: (0, 7), raising=False)
    with fxwrap.register_device("mtia", device_graph=Graph):
        runtime = runtime_for(torch.device("mtia", 0))
        assert (
            isinstance(runtime.new_graph(runtime.new_pool()), Graph)
            and runtime.implementation == "the graph registered for mtia"
        )
    assert asked == [None, (0, 7)]  # tried once, then made in a pool
    with pytest.raises(CaptureError, match="no device graph for mtia:0"):
        runtime_for(torch.device("mtia", 0))


def test_the_devices_codegen_is_used_and_the_option_goes_before_it(compiled: Any) -> None:
    made = []

    class OfDevice(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: torch.fx.GraphModule) -> Any:
            made.append("device")
            return super().compile_graph(gm)

    class OfOption(fxwrap.FxwrapCodegen):
        def compile_graph(self, gm: torch.fx.GraphModule) -> Any:
            made.append("option")
            return super().compile_graph(gm)

    with fxwrap.register_device("cpu", codegen=OfDevice):
        compiled(lambda x: x.sin())(torch.randn(4))
        compiled(lambda x: x.sin(), options={"codegen": OfOption})(torch.randn(4))
    compiled(lambda x: x.sin())(torch.randn(4))
    assert made == ["device", "option"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("toaster", {}, "no device 'toaster' to register"),
        ("toaster", {"scheduling": "none"}, "no device 'toaster' to register"),
        ("mtia", {"scheduling": "cp"}, "needs a scheduling"),
        ("mtia", {"scheduling": "cpp"}, "nothing says how they are launched"),
        ("mtia", {"config": {"no_such_setting": 1}}, "Inductor has no setting 'no_such_setting'"),
        ("mtia", {"codegen": dict}, "wrong codegen"),
        ("mtia", {"eager_ops": ["nosuch::op"]}, "no operator is called 'nosuch::op'"),
        ("mtia", {"eager_ops": "aten::mmm"}, "did you mean 'aten::mm'"),
        ("mtia", {"eager_ops": [3]}, "wrong value for option 'eager_ops'"),
        ("mtia", {"eager_ops": None}, "wrong eager_ops"),
        ("mtia", {"kernels": "cpp"}, "wrong kernels"),
        ("mtia", {"kernels": 3}, "wrong kernels"),
        ("mtia", {"kernels": [run_directly]}, "wrong kernels"),
        ("mtia", {"cost": 3}, "wrong cost"),
        ("mtia", {"config": ["split_reductions"]}, "wrong config"),
        ("mtia", {"scheduling": ["triton"]}, "needs a scheduling"),
        ("mtia:0", {}, "'mtia:0' is no type of device"),
        (torch.device("mtia"), {}, "is no type of device"),
    ],
)
def test_bad_registrations(name: Any, arguments: dict[str, Any], message: str) -> None:
    before = tables()
    with pytest.raises(fxwrap.DeviceError, match=message):
        fxwrap.register_device(name, **arguments)
    assert [len(table) for table in tables()] == [len(table) for table in before] or before[1] == {}


def test_one_operator_and_one_kind_need_no_list() -> None:
    kind, rule = fxwrap.cpp_kernels(run_directly), fxwrap.EagerRule("a reason", ("aten::mm",))
    for given in ("aten::mm", rule):
        with fxwrap.register_device("mtia", scheduling="cpp", kernels=kind, eager_ops=given) as handle:
            assert handle.support.kernels == (kind,) and handle.support.eager_ops == (given,)
    with fxwrap.register_device("mtia", eager_ops=(name for name in ["aten::mm", "aten::add.Tensor"])) as handle:
        assert handle.support.eager_ops == ("aten::mm", "aten::add.Tensor")


def test_registered_twice() -> None:
    with (
        fxwrap.register_device("mtia"),
        pytest.raises(fxwrap.DeviceError, match="'mtia' is registered already"),
    ):
        fxwrap.register_device("mtia")


def test_an_option_against_the_devices_settings(compiled: Any) -> None:
    with (
        fxwrap.register_device("cpu", config={"split_reductions": False}),
        pytest.raises(Exception, match="option 'split_reductions' cannot be set on this device"),
    ):
        compiled(lambda x: x.sin(), options={"split_reductions": True})(torch.randn(4))


def test_streams_that_a_device_module_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch has them for every accelerator whose guard has streams (examples/minimal has none of its own)."""
    module = torch.get_device_module("mtia")
    assert device_function("mtia", "current_stream") is module.current_stream
    for name in ("current_stream", "synchronize", "stream"):
        monkeypatch.delattr(module, name)
    assert device_function("mtia", "current_stream") is torch.accelerator.current_stream
    interface = _interface("mtia", triton=False)
    assert interface.synchronize is torch.accelerator.synchronize  # type: ignore[attr-defined]
    assert _OpOverrides("mtia", "at::kMTIA").synchronize() == "torch.accelerator.synchronize()"
    with pytest.raises(KeyError):
        device_function("mtia", "no_such_function")


@pytest.mark.skipif(
    not hasattr(common, "_privateuse1_backend_init_in_progress"), reason="torch 2.15 and later have the hook"
)
def test_torch_calls_the_registration() -> None:
    """``torch.<device>._inductor_backend_init``: nobody has registered the device before it is compiled for."""
    program = """
import minimal, torch, fxwrap
from fxwrap.devices import registered_devices
minimal.load()
torch.minimal._inductor_backend_init = minimal.register
f = torch.compile(lambda x: (x @ x).relu() + 1, backend="fxwrap", options={"capture": "always"})
x = torch.randn(4, 4)
for _ in range(3):
    assert not _ or "minimal" in registered_devices()
    assert torch.equal(f(x.to("minimal")).cpu(), (x @ x).relu() + 1)
assert fxwrap.stats(f)["replays"] == 1
"""
    done = processes.run("-c", program, cwd=ROOT / "examples" / "minimal")
    assert done.returncode == 0, done.stderr


def test_the_line_names_no_device_of_the_examples() -> None:
    """Adding a device touches no file of the line."""
    for path in (ROOT / "fxwrap").rglob("*.py"):
        text = path.read_text(encoding="utf-8").lower()
        assert "hostsim" not in text, path
