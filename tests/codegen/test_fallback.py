"""A fallback always works: wherever compiling fails, the graph runs through Inductor's own wrapper."""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Compiled, assert_same, inductor
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

import fxwrap
from fxwrap.codegen import inductor as compiling
from fxwrap.codegen.emit.converter import HostGraphConverter


class PlantedError(Exception):
    """A fault of fxwrap's own that nobody expects."""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    dynamo = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
    # A program that a cache holds is not emitted again.
    caches = torch._inductor.config.patch(fx_graph_cache=False)
    with dynamo, caches, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


@torch.library.custom_op("fxwrap_fallback::counted", mutates_args=())
def counted(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return x * 2, int((x > 0).sum())


@counted.register_fake
def _(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    return torch.empty_like(x), torch.library.get_ctx().new_dynamic_size(min=0, max=100)


def sizes_of_data(x: torch.Tensor) -> tuple[Any, ...]:
    y, n = counted(x)
    chosen = torch.masked_select(x, x > 0)
    total = x.sum().item()
    return y + 1, torch.ones(n) * 2, chosen.sin(), x.nonzero() * 2, x * total


def promised(x: torch.Tensor) -> torch.Tensor:
    z = x.nonzero()
    torch._check(z.size(0) == 16)
    return z + 1


def control_flow(x: torch.Tensor) -> torch.Tensor:
    either = torch.cond(x.sum() > 0, lambda x: x @ x, lambda x: x - 1, (x,))
    count = torch.zeros((), dtype=torch.long)
    loop = torch._higher_order_ops.while_loop
    return loop(lambda i, y: i < 2, lambda i, y: (i + 1, y @ y * 0.5), (count, either))[1]


def writes_its_input(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x @ x


PROGRAMS: dict[str, tuple[Callable[..., Any], bool]] = {
    "sizes of data": (sizes_of_data, False),
    "a promised size": (promised, False),
    "control flow": (control_flow, False),
    "a written input": (writes_its_input, False),
    "training": (lambda x: (x.sin() @ x).relu().sum(), True),
}


def fail_after_line(number: int, patch: pytest.MonkeyPatch) -> None:
    read, lines = HostGraphConverter._read_line, []

    def reading(self: HostGraphConverter, line: Any, text: Any) -> None:
        lines.append(line)
        read(self, line, text)
        if len(lines) == number:
            raise PlantedError(str(line))

    patch.setattr(HostGraphConverter, "_read_line", reading)


def fail_in(name: str, patch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise PlantedError(name)

    patch.setattr(HostGraphConverter, name, fail)


class WithSymbols(fxwrap.FxwrapCodegen):
    """A pass that makes sizes, as the fake kernel of a data-dependent operator does, and fails."""

    def passes(self) -> Any:
        def make(gm: GraphModule) -> None:
            V.graph.sizevars.shape_env.create_unbacked_symint()
            V.graph.sizevars.shape_env.create_unbacked_symfloat()
            raise PlantedError

        return (make,)


PLACES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    **{f"line {number}": functools.partial(fail_after_line, number) for number in (1, 2, 3, 5, 7)},
    "inputs": functools.partial(fail_in, "_generate_graph_inputs"),
    "the outputs": functools.partial(fail_in, "_outputs"),
    "a pass of the user's": lambda patch: None,
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_wherever_emission_fails(program: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, trains = PROGRAMS[program]
    options = {"codegen": WithSymbols} if place == "a pass of the user's" else {}
    f, theirs = Compiled(function, compile_options={"options": options}), inductor(function)
    results = []
    for g in (theirs, f):
        torch.manual_seed(0)
        with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
            if g is f:
                PLACES[place](patch)
            for _ in range(2):
                x = torch.randn(4, 4, requires_grad=trains)
                result = g(x)
                if trains:
                    result.backward()
                results.append((result, x.detach(), x.grad))
    assert_same(results[2:], results[:2])
    assert f.compilation.fallbacks and len(f.programs) <= 1  # backward compiles after a line that fails only once


# -- Inductor fails on what fxwrap makes of a graph ----------------------------------------------------------------


def marks(gm: GraphModule, name: str) -> bool:
    """A rewrite for any device: what the graph returns first is negated twice."""
    (output,) = gm.graph.find_nodes(op="output")
    results = [value for value in output.args[0] if isinstance(value, Node)]
    result = next(value for value in results if isinstance(value.meta["val"], torch.Tensor))
    with gm.graph.inserting_before(output):
        once = gm.graph.call_function(torch.ops.aten.neg.default, (result,))
        twice = gm.graph.call_function(torch.ops.aten.neg.default, (once,))
    for node in (once, twice):
        node.meta = {**result.meta, "marked": name}
    output.replace_input_with(result, twice)
    gm.recompile()
    return True


FIRST, SECOND = functools.partial(marks, name="first"), functools.partial(marks, name="second")
REWRITES = {**compiling._REWRITES, FIRST: "the first marks", SECOND: "the second marks"}


def fail_to_lower(patch: pytest.MonkeyPatch, fails: Callable[[GraphLowering, Node], bool]) -> None:
    lower = GraphLowering.run_node

    def lowering(self: GraphLowering, node: Node) -> Any:
        if fails(self, node):
            raise NotImplementedError(f"no lowering of {node.name}")
        return lower(self, node)

    patch.setattr(GraphLowering, "run_node", lowering)


def results_of(g: Callable[..., Any], trains: bool, device: torch.device) -> list[Any]:
    results = []
    torch.manual_seed(0)
    for _ in range(3):
        x = torch.randn(4, 4).to(device).requires_grad_(trains)
        result = g(x)
        if trains:
            result.backward()
        results.append(
            copy.deepcopy(
                pytree.tree_map(lambda y: y.detach() if isinstance(y, torch.Tensor) else y, (result, x, x.grad))
            )
        )
    return results


@pytest.mark.parametrize(
    ("failing", "strict"), [(("second",), False), (("first", "second"), True), (("first",), False)], ids=str
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_rewrite_with_which_inductor_fails_is_left_out(
    program: str, failing: tuple[str, ...], strict: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, trains = PROGRAMS[program]
    if device.type != "cpu" and program == "control flow":
        pytest.skip("its counter is on the host")
    f = Compiled(function, compile_options={"options": {"strict": strict}})
    expected = results_of(inductor(function), trains, device)
    monkeypatch.setattr(compiling, "_REWRITES", REWRITES)
    with monkeypatch.context() as patch:
        fail_to_lower(patch, lambda _, node: node.meta.get("marked") in failing)
        got = results_of(f, trains, device)
    assert_same(got, expected)
    assert not f.compilation.fallbacks and len(f.programs) == 1 + trains
    left_out = {"the second marks", *(f"the {name} marks" for name in failing)}  # the last one is left out first
    for one in f.programs:
        assert {event.split(":")[0] for event in one.counters.events if event.startswith("compiled without")} == {
            f"compiled without {what}" for what in left_out
        }


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_wherever_lowering_fails_with_fxwraps_settings(
    program: str, strict: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each node in turn. Inductor's own wrapper compiles the graph, and so it runs."""
    function, trains = PROGRAMS[program]
    if device.type != "cpu" and program == "control flow":
        pytest.skip("its counter is on the host")
    expected = results_of(inductor(function), trains, device)
    for place in (0, 3):
        torch._dynamo.reset()
        f, counter = Compiled(function, compile_options={"options": {"strict": strict}}), itertools.count()
        with monkeypatch.context() as patch, warnings.catch_warnings(action="ignore"):
            fail_to_lower(patch, lambda _, node, c=counter, p=place: config.fx_wrapper and next(c) >= p)
            if strict:
                with pytest.raises(Exception, match="Inductor fails on what fxwrap asks of it"):
                    results_of(f, trains, device)
                continue
            assert_same(results_of(f, trains, device), expected)
        assert not f.programs and len(f.compilation.fallbacks) == 1 + trains
        assert all("no lowering of" in reason for reason in f.compilation.fallbacks)


def test_what_fails_with_the_graph_as_it_was_is_inductors(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, x = PROGRAMS["a written input"][0], torch.randn(4, 4, device=device)
    said = []
    with monkeypatch.context() as patch:
        fail_to_lower(patch, lambda _, node: node.op == "output")
        for g in (inductor(function), Compiled(function)):
            with pytest.raises(Exception, match="no lowering of output") as caught:
                g(x.clone())
            said.append((type(caught.value), str(caught.value).splitlines()[0]))
    assert said[0] == said[1]


def test_a_full_disk_is_no_failure_of_inductors(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def full(self: GraphLowering, node: Node) -> Any:
        attempts.append(node)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(Exception, match="No space left"):
        patch.setattr(GraphLowering, "run_node", full)
        Compiled(torch.sin)(torch.randn(4, device=device))
    assert len(attempts) == 1


# -- scalars on the host ---------------------------------------------------------------------------------------------


HELD = torch.arange(7.0)
SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a product of sizes": lambda a: a.sum() / torch.prod(torch.tensor(a.size())),
    "a sum of constants": lambda a: a * torch.tensor([1.0, 2.0, 3.0]).sum(),
    "a maximum": lambda a: a + torch.arange(5).max(),
    "an argmax": lambda a: a + torch.tensor([3, 9, 1]).argmax(),
    "a variance": lambda a: a + torch.arange(5.0).var(),
    "a long sum": lambda a: a + torch.arange(5000.0).sum(),
    "a truth": lambda a: torch.where((torch.arange(5) > 3).any(), a, -a),
    "an input's sum": lambda a: a * HELD.sum(),
    "elementwise": lambda a: a * torch.tensor(3.0).sin(),
    "a sum of sums": lambda a: a * (torch.arange(4.0).sum() + torch.ones(3).sum()).exp().log(),
    "two uses": lambda a: (a * torch.arange(4.0).sum()).sum(0) + torch.arange(4.0).sum(),
    "a draw": lambda a: a + torch.ones(3).cumsum(0).sum(),
}


@pytest.mark.parametrize("name", SCALARS)
def test_scalars_of_the_host_beside_a_tensor_of_the_device(name: str, device: torch.device) -> None:
    x = torch.randn(4, 4, device=device)
    f, theirs = Compiled(SCALARS[name], compile_options={"options": {"strict": True}}), inductor(SCALARS[name])
    for _ in range(3):
        # Of a condition on the host, Inductor leaves the result of a device out of the tree on the host.
        assert_same(f(x), theirs(x).to(device))
    assert not [event for event in f.program.counters.events if event.startswith("compiled without")]


# -- settings that fxwrap does not use -------------------------------------------------------------------------------


class Settings(fxwrap.FxwrapCodegen):
    def passes(self) -> Any:
        assert not config.triton.enable_pdl
        return ()


@pytest.mark.skipif(not hasattr(config.triton, "enable_pdl"), reason="this torch has no dependent launches")
def test_dependent_launches_are_off_and_it_is_said_once(device: torch.device) -> None:
    compiling._say_that_launches_wait.cache_clear()
    with config.patch({"triton.enable_pdl": True}), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for function in (torch.sin, torch.cos):
            f = Compiled(function, compile_options={"options": {"codegen": Settings, "strict": True}})
            f(torch.randn(4, device=device))
        assert config.triton.enable_pdl  # the process's setting stays
    assert len([one for one in said if "enable_pdl" in str(one.message)]) == 1
    with pytest.raises(Exception, match=r"triton.enable_pdl"):
        Compiled(torch.sin, compile_options={"options": {"triton.enable_pdl": True}})(torch.randn(4))
