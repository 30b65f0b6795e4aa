"""``fxwrap.aot_compile``: methods in memory. They share the module's weights; ``save`` takes them as they are."""

from __future__ import annotations

import concurrent.futures
import contextvars
import copy
import gc
import json
import pickle
import re
import shutil
import weakref
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_same, inductor
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache

import fxwrap
from fxwrap.errors import InputError, OptionError, StorageError

ALWAYS = {"options": {"capture": "always"}}
LONGEST, WIDTH = 24, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(x)))  # type: ignore[no-any-return]


class Cached(nn.Module):
    """Attention over what it has seen, which it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.register_buffer("keys", torch.zeros(1, LONGEST, WIDTH))
        self.register_buffer("values", torch.zeros(1, LONGEST, WIDTH), persistent=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, -1)
        self.keys[:, at], self.values[:, at] = key, value
        seen = torch.arange(LONGEST, device=x.device) <= at[:, None]
        scores = (query @ self.keys.transpose(1, 2)).masked_fill(~seen, float("-inf"))
        return torch.softmax(scores, -1) @ self.values


class Holder(nn.Module):
    """Has buffers by name."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class Fill(Holder):
    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(x)
        return self.a * 2


class Sum(Holder):
    def forward(self, x: Tensor) -> Tensor:
        return sum((buffer.sum() for buffer in self.buffers()), x)  # type: ignore[return-value]


def both_ways(path: Path, methods: dict[str, Any], **options: Any) -> list[fxwrap.AotProgram]:
    """A program in memory, and the same methods saved and loaded."""
    compiled = fxwrap.aot_compile(methods, **options)
    return [compiled, fxwrap.load(fxwrap.save(path / "methods.fxw", methods, **options), trust=True)]


def cached_methods(model: nn.Module, device: torch.device) -> dict[str, Any]:
    length = torch.export.Dim("length", min=2, max=LONGEST)
    several = torch.randn(1, 4, WIDTH, device=device), torch.arange(4, device=device)
    prefill = torch.export.export(model, several, dynamic_shapes=({1: length}, {0: length}))
    return {"prefill": prefill, "decode": (model, (several[0][:, :1].clone(), several[1][:1].clone()))}


# -- numbers ---------------------------------------------------------------------------------------------------


def test_numbers_are_those_of_inductor_and_of_a_file(device: torch.device, tmp_path: Path) -> None:
    """Bit for bit, and outputs stay what they are for as long as somebody has them."""
    model = nn.Sequential(Block(), Block()).to(device).eval()
    reference = inductor(model)
    inputs = [torch.randn(4, WIDTH, device=device) for _ in range(6)]
    with torch.no_grad():
        expected = [reference(x).clone() for x in inputs]
    for program in both_ways(tmp_path, {"forward": (model, (inputs[0],))}, **ALWAYS):
        kept = [program.forward(x) for x in inputs]
        assert_same(kept, expected)
        assert_same([program["forward"](x) for x in inputs], expected)
        assert_same(kept, expected)
        assert not any(result.requires_grad for result in kept)
        assert program.forward.program.counters.replays > 0


def test_methods_of_any_size_share_a_cache_that_they_write(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Cached().to(device).eval()
    eager = copy.deepcopy(model)
    in_memory, loaded = both_ways(tmp_path, cached_methods(model, device), **ALWAYS)
    for length in (5, 9, 5, 2):
        prompt, at = torch.randn(1, length, WIDTH, device=device), torch.arange(length, device=device)
        results = [program.prefill(prompt, at) for program in (in_memory, loaded)]
        with torch.no_grad():
            torch.testing.assert_close(results[0], eager(prompt, at))
        assert_same(results[:1], results[1:])
        for step in range(3):
            token, place = torch.randn(1, 1, WIDTH, device=device), torch.tensor([length + step], device=device)
            results = [program.decode(token, place) for program in (in_memory, loaded)]
            with torch.no_grad():
                torch.testing.assert_close(results[0], eager(token, place))
            assert_same(results[:1], results[1:])
    torch.testing.assert_close(model.keys, eager.keys)
    assert_same([in_memory.weights["keys"], in_memory.weights["values"]], [model.keys, model.values])
    assert in_memory.weights.keys() == loaded.weights.keys()
    assert str(in_memory.methods["prefill"]) == str(loaded.methods["prefill"])
    model.keys.zero_()
    model.values.zero_()
    token, place = torch.randn(1, 1, WIDTH, device=device), torch.tensor([0], device=device)
    with torch.no_grad():
        expected = Cached().to(device).eval()
        expected.load_state_dict(model.state_dict())
        torch.testing.assert_close(in_memory.decode(token, place), expected(token, place))


# -- weights ---------------------------------------------------------------------------------------------------


def test_weights_are_those_of_the_module(device: torch.device) -> None:
    """What is written to one is written to the other, without another recording."""
    model, x = Block().to(device), torch.randn(4, WIDTH, device=device)
    program = fxwrap.aot_compile({"forward": (model, (x,)), "again": (model, (x,))}, **ALWAYS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(program.forward(x), model(x))
            torch.testing.assert_close(program.again(x), model(x))

    for _ in range(3):
        check()
    recordings = program.forward.program.counters.to_dict()["recordings"]
    model(x).square().sum().backward()
    before = program.forward(x).clone()
    optimizer.step()
    check()
    assert not torch.equal(program.forward(x), before)
    model.load_state_dict(Block().state_dict())
    check()
    program.load_weights({"linear.bias": torch.ones(WIDTH)})
    assert torch.equal(model.linear.bias.detach(), torch.ones(WIDTH, device=device))
    check()
    assert program.forward.program.counters.to_dict()["recordings"] == recordings
    own = dict(model.named_parameters())
    for name, weight in program.weights.items():
        assert weight.data_ptr() == own[name].data_ptr() and not weight.requires_grad
        assert program.forward.weights[name] is program.again.weights[name] is weight


def test_a_parameter_that_takes_the_place_of_another_is_not_seen() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    program = fxwrap.aot_compile({"forward": (model, (x,))})
    before = program.forward(x)
    model.load_state_dict({"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, assign=True)
    assert torch.equal(program.forward(x), before)
    model = nn.Linear(4, 4).requires_grad_(False)
    program = fxwrap.aot_compile({"forward": (model, (x,))})
    before = program.forward(x)
    model.weight.data = torch.zeros(4, 4)  # the parameter is the same object, with other memory
    assert torch.equal(program.forward(x), before)


def test_a_weight_that_is_returned_is_that_of_the_program() -> None:
    class Table(Holder):
        def forward(self, x: Tensor) -> Any:
            return x, self.table

    model, x = Table(table=torch.randn(40)), torch.ones(3)
    program = fxwrap.aot_compile({"f": (model, (x,))})
    for _ in range(3):
        same, table = program.f(x)
        assert same is x and table is program.weights["table"] and table.data_ptr() == model.table.data_ptr()


def test_weights_that_share_memory_in_other_shapes_need_no_file(tmp_path: Path) -> None:
    """In memory one method reads what another writes; in a file each weight has memory of its own."""
    cache = torch.zeros(4)
    methods = {"fill": (Fill(a=cache), (torch.ones(4),)), "sum": (Sum(v=cache.view(2, 2)), (torch.zeros(2),))}
    program = fxwrap.aot_compile(methods)
    for count in range(1, 5):
        assert torch.equal(program.fill(torch.ones(4)), torch.full((4,), 2.0 * count))
        assert torch.equal(program.sum(torch.zeros(2)), torch.full((2,), 4.0 * count))
    assert torch.equal(cache, torch.full((4,), 4.0))
    with pytest.raises(StorageError, match="'a' of 'fill' and 'v' of 'sum' share memory"):
        fxwrap.save(tmp_path / "program.fxw", program)


def test_names_are_those_of_a_file(tmp_path: Path) -> None:
    """Also where a constant of one method has the name of a weight of another, and where one weight has two names."""

    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.randn(3, 3)  # neither parameter nor buffer

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight  # type: ignore[no-any-return]

    tied, x = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), torch.ones(2, 3)
    tied[1].weight = tied[0].weight
    methods = {"constant": (Constant(), (x,)), "f": (nn.Linear(3, 3), (x,)), "g": (nn.Linear(3, 3), (x,))}
    in_memory, loaded = both_ways(tmp_path, {**methods, "tied": (tied, (x,))})
    assert list(in_memory.weights) == list(loaded.weights)
    assert {"weight", "g.weight", "0.weight"} <= in_memory.weights.keys()
    for program in (in_memory, loaded):
        program.load_weights({"1.weight": torch.zeros(3, 3)})
        assert not program.weights["0.weight"].any()
        with pytest.raises(StorageError, match="nobody"):
            program.load_weights({"nobody": torch.zeros(1)})
    assert not tied[0].weight.any()


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_a_weight_whose_memory_has_other_numbers_is_refused(tmp_path: Path, bit: str) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j]).conj()
    methods = {"f": (Sum(b=z.imag if bit == "neg" else z), (torch.ones(2, dtype=torch.complex64),))}
    with pytest.raises(StorageError, match=rf"'b' of 'f'[\s\S]*{bit} bit[\s\S]*resolve_{bit}"):
        fxwrap.aot_compile(methods)
    fxwrap.save(tmp_path / "program.fxw", methods)  # in a file a weight is its numbers


# -- frozen weights --------------------------------------------------------------------------------------------

FROZEN = {"options": {"freezing": True}}


class Images(nn.Module):
    """A convolution, into which freezing folds the normalisation, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(288, 64)
        self.norm.running_mean, self.norm.running_var = torch.rand(8), torch.rand(8) + 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x))).flatten(1))  # type: ignore[no-any-return]


def test_frozen_weights_are_packed_once_and_saved(tmp_path: Path) -> None:
    model, x = Images().eval(), torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        with config.patch(freezing=True):
            expected = torch.compile(torch.export.export(model, (x,)).module())(x)
        in_memory, loaded = both_ways(tmp_path, {"forward": (model, (x,))}, **FROZEN)
        again = fxwrap.load(fxwrap.save(tmp_path / "again.fxw", in_memory), trust=True)
    for program in (in_memory, loaded, again):
        assert not program.weights and set(program.forward.frozen) == model.state_dict().keys()
        for _ in range(3):
            assert torch.equal(program.forward(x), expected)
        with pytest.raises(StorageError, match=r"conv\.bias[\s\S]*not frozen"):
            program.load_weights({"conv.bias": torch.zeros(8)})
    if torch.backends.mkldnn.is_available():
        graph = in_memory.forward.program.plan.graph
        assert any(getattr(graph, str(node.target)).is_mkldnn for node in _constants(graph))
    with pytest.raises(StorageError, match="weights=False"):
        fxwrap.save(tmp_path / "bare.fxw", in_memory, weights=False)


def _constants(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    attributes = graph.graph.find_nodes(op="get_attr")
    return [node for node in attributes if isinstance(getattr(graph, str(node.target)), Tensor)]


def test_a_frozen_result_is_the_callers() -> None:
    class Doubled(Holder):
        def forward(self, x: Tensor) -> Any:
            return x + 1, self.weight * 2

    weight = torch.randn(40)
    with torch.no_grad():
        program = fxwrap.aot_compile({"forward": (Doubled(weight=weight).eval(), (torch.ones(3),))}, **FROZEN)
    for _ in range(3):
        _, doubled = program.forward(torch.ones(3))
        assert torch.equal(doubled, weight * 2)
        doubled.zero_()


@pytest.mark.parametrize("view", [False, True], ids=["the same", "a part"])
def test_a_weight_is_not_frozen_in_one_method_and_written_by_another(view: bool) -> None:
    count = torch.zeros(4)
    methods = {
        "read": (Sum(seen=count[:2] if view else count).eval(), (torch.zeros(4),)),
        "fill": (Fill(a=count).eval(), (torch.ones(4),)),
    }
    with (
        torch.no_grad(),
        pytest.raises(StorageError, match=r"'a' of 'fill' is written[\s\S]*'seen' of 'read' is frozen"),
    ):
        fxwrap.aot_compile(methods, **FROZEN)


# -- arguments and results -------------------------------------------------------------------------------------


@dataclass
class Point:
    x: Tensor
    scale: float


class Pair(NamedTuple):
    first: Any
    second: Any


torch.export.register_dataclass(Point)


class Nested(nn.Module):
    def forward(self, pair: Any, *, options: dict[str, Any], n: int) -> Any:
        a, b = pair
        return {"sum": [a + b, None, n], "pair": Pair(a * options["scale"], OrderedDict(b=b))}


def test_keywords_and_nested_arguments(tmp_path: Path) -> None:
    x, y, model = torch.randn(3), torch.randn(3), Nested()
    kwargs = {"options": {"scale": torch.tensor(2.0), "unused": 3}, "n": 4}
    methods = {"f": torch.export.export(model, (Pair(x, y),), kwargs)}
    for program in both_ways(tmp_path, methods):
        for _ in range(3):
            result, expected = program.f(Pair(x, y), **kwargs), model(Pair(x, y), **kwargs)
            assert type(result["pair"]) is Pair and result["sum"][1:] == [None, 4]
            assert_same(result, expected)
        for args, wrong in (((Pair(x, y),), {**kwargs, "n": 5}), (((x, y),), kwargs), ((Pair(x, y),), {})):
            with pytest.raises(InputError):
                program.f(*args, **wrong)


def test_a_class_of_a_function_comes_back() -> None:
    class Local(NamedTuple):
        value: Any

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return Local(x + 1)

    result = fxwrap.aot_compile({"f": (Makes(), (torch.ones(2),))}).f(torch.ones(2))
    assert type(result) is Local and torch.equal(result.value, torch.full((2,), 2.0))


class OfPoint(nn.Module):
    def forward(self, point: Point) -> Any:
        return [Point(point.x * point.scale, point.scale)]


class Largest(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.max(1)


class Numbered(nn.Module):
    def forward(self, parts: dict[Any, Tensor]) -> Any:
        return {2: parts[0] + 1, "b": parts["b"] * 2}


CONTAINERS: dict[str, tuple[nn.Module, Callable[[], Any], list[Any]]] = {
    "a dataclass": (
        OfPoint(),
        lambda: Point(torch.ones(3), 2.0),
        [Point(torch.ones(3), 3.0), torch.ones(3), Point(torch.ones(4), 2.0), [torch.ones(3), 2.0]],
    ),
    "a structure of torch's": (Largest(), lambda: torch.randn(3, 4), [torch.randn(4, 4)]),
    "keys that are numbers": (
        Numbered(),
        lambda: {0: torch.ones(3), "b": torch.ones(2)},
        [{0: torch.ones(3)}, {1: torch.ones(3), "b": torch.ones(2)}, torch.ones(3)],
    ),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_what_only_this_process_knows_is_taken_and_returned_and_not_saved(tmp_path: Path, name: str) -> None:
    model, make, others = CONTAINERS[name]
    example, said = make(), list[str]()
    program = fxwrap.aot_compile({"f": (model, (example,))})
    for _ in range(3):
        result, expected = program.f(example), model(example)
        assert type(result) is type(expected)
        assert_same(result, expected)
    for other in others:
        with pytest.raises(InputError):
            program.f(other)
    with pytest.raises(StorageError, match=r"among arguments or results|keys of a dictionary"):
        fxwrap.save(tmp_path / "program.fxw", program)
    with pytest.raises(StorageError, match=r"among arguments or results|keys of a dictionary"):
        fxwrap.save(tmp_path / "program.fxw", {"f": (model, (example,))}, progress=said.append)
    assert said == ["f: tracing"], "it is refused before anything is compiled"
    assert not list(tmp_path.iterdir())


class OwnPartitions(fxwrap.FxwrapCodegen):
    """Compiles partitions to functions that add 100 to what they write."""

    def compile_partition(self, graph: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            outputs = graph.module(*inputs)
            for place in graph.signature.mutated:
                inputs[place].add_(100)
            return outputs

        return run


def test_a_partition_that_is_compiled_elsewhere_runs_and_is_not_saved(tmp_path: Path) -> None:
    x = torch.ones(4)
    program = fxwrap.aot_compile({"f": (Sum(b=torch.ones(4)), (x,))}, options={"codegen": OwnPartitions})
    assert [program.f(x).tolist() for _ in range(3)] == [[105.0] * 4] * 3
    with pytest.raises(StorageError, match="compile_partition"):
        fxwrap.save(tmp_path / "program.fxw", program)


# -- calls that are refused ------------------------------------------------------------------------------------

X = torch.ones(1, 3, WIDTH)
AT = torch.arange(3)
CALLS: dict[str, tuple[Any, ...]] = {
    "no inputs": (),
    "one too many": (X, AT, AT),
    "rank": (X[0], AT),
    "a fixed size": (X.repeat(2, 1, 1), AT),
    "two sizes that are one": (X, torch.arange(4)),
    "too small": (X[:, :1], AT[:1]),
    "dtype": (X.double(), AT),
    "device": (X.to("meta"), AT),
    "stride": (torch.ones(1, 6, WIDTH)[:, ::2], AT),
    "a list": ([1, 2], AT),
    "a gradient": (torch.ones(1, 3, WIDTH, requires_grad=True), AT),
}


@pytest.fixture(scope="module")
def two_programs(tmp_path_factory: pytest.TempPathFactory) -> list[fxwrap.AotProgram]:
    methods = cached_methods(Cached().eval(), torch.device("cpu"))
    return both_ways(tmp_path_factory.mktemp("saved"), methods)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_refused_in_the_words_of_a_loaded_program(two_programs: Any, name: str) -> None:
    said = []
    for program in two_programs:
        program.prefill(X, AT)
        before = program.weights["keys"].clone()
        with pytest.raises(InputError) as raised:
            program.prefill(*CALLS[name])
        said.append(str(raised.value))
        assert torch.equal(program.weights["keys"], before)
    assert said[0] == said[1] and "got" in said[0]


def test_what_is_written_shares_no_memory_with_an_input() -> None:
    model = Fill(a=torch.zeros(4))
    program = fxwrap.aot_compile({"f": (model, (torch.ones(4),))})
    for count in range(1, 4):
        assert torch.equal(program.f(torch.ones(4)), torch.full((4,), 2.0 * count))
        with pytest.raises(InputError, match="shares memory"):
            program.f(model.a)
    with torch.autocast("cpu", torch.bfloat16):
        assert program.f(torch.ones(4)).dtype is torch.float32


# -- threads, reports, lifetimes -------------------------------------------------------------------------------


def test_several_threads_call_one_method(device: torch.device) -> None:
    model = Block().to(device).eval()
    inputs = [torch.randn(4, WIDTH, device=device) for _ in range(4)]
    program = fxwrap.aot_compile({"forward": (model, (inputs[0],))}, **ALWAYS)
    expected = [program.forward(x).clone() for x in inputs]
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        # The simulated device is that of a context.
        calls = [(contextvars.copy_context().run, program.forward, x) for _ in range(8) for x in inputs]
        results = [pool.submit(*call) for call in calls]
    for x, result in zip(expected * 8, results, strict=True):
        assert torch.equal(result.result(), x)


def test_reports_counters_and_release_know_a_program(device: torch.device, tmp_path: Path) -> None:
    model, x = Block().to(device), torch.randn(4, WIDTH, device=device)
    for program in both_ways(tmp_path, {"f": (model, (x,)), "g": (model, (x,))}, **ALWAYS):
        for _ in range(4):
            program.f(x)
        counted = fxwrap.stats(program)
        assert counted["programs"] == 2 and counted["replays"] > 0
        assert fxwrap.stats(program.f)["replays"] == counted["replays"] and not fxwrap.stats(program.g)["replays"]
        shown = {id(graph.program) for graph in fxwrap.report().graphs}
        assert {id(program.f.program), id(program.g.program)} <= shown
        assert "partition" in str(program.explain()) and str(fxwrap.report(program)) == str(program.explain())
        expected, recordings = program.f(x).clone(), fxwrap.stats(program)["recordings"]
        fxwrap.release(program)
        assert torch.equal(program.f(x), expected)
        assert sum(fxwrap.stats(program)["recordings"].values()) == sum(recordings.values()) + 1


def test_sizes_are_recorded_ahead() -> None:
    rows = torch.export.Dim("rows", min=2, max=64)
    method = torch.export.export(Block(), (torch.randn(4, WIDTH),), dynamic_shapes=({0: rows},))
    program = fxwrap.aot_compile({"f": method}, **ALWAYS)
    assert fxwrap.record(program.f, *(torch.randn(count, WIDTH) for count in (3, 5))) == 2
    before = fxwrap.stats(program)
    program.f(torch.randn(5, WIDTH))
    assert fxwrap.stats(program) == {**before, "replays": before["replays"] + 1}


def test_a_program_that_nobody_has_is_freed() -> None:
    model, x = Block(), torch.randn(4, WIDTH)
    program = fxwrap.aot_compile({"f": (model, (x,))})
    for _ in range(3):
        program.f(x)
    of_model, weight = weakref.ref(model), weakref.ref(model.linear.weight)
    of_program = weakref.ref(program.f.program)
    del model
    gc.collect()
    assert of_model() is None and weight() is not None, "it has the weights, and not the module"
    del program
    gc.collect()
    assert of_program() is None and weight() is None


def test_a_program_is_not_copied() -> None:
    program = fxwrap.aot_compile({"f": (Sum(b=torch.ones(2)), (torch.ones(2),))})
    for what in (program, program.f):
        for copied in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(StorageError, match="cannot be copied"):
                copied(what)


# -- programs in files -----------------------------------------------------------------------------------------


def members_of(path: Path) -> dict[str, Any]:
    """Members without Inductor's number of the compilation, which is a comment in the text that defines kernels."""
    with zipfile.ZipFile(path) as file:
        members: dict[str, Any] = {name: file.read(name) for name in file.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    digests = manifest.pop("members")
    assert digests.keys() == members.keys()
    for name in manifest["methods"]:
        data = members[f"programs/{name}.json"] = json.loads(members[f"programs/{name}.json"])
        texts = data["graph"]["modules"]
        for kernel in data["graph"]["attributes"].values():
            begin, end = kernel["source"]
            kernel["source"] = texts[kernel["module"]][begin:end]
        texts[:] = [re.sub(r"AOT ID: \['\d+", "AOT ID: [", text) for text in texts]
    return {**manifest, **members}


@pytest.mark.parametrize("how", [{}, {"compile": "source"}, {"weights": False}], ids=str)
def test_a_program_and_its_methods_make_the_same_file(tmp_path: Path, how: dict[str, Any]) -> None:
    model, said = Cached().eval(), list[str]()
    methods = cached_methods(model, torch.device("cpu"))
    options = {"warmup": 2, "capture": "always"}
    program = fxwrap.aot_compile(methods, options=options, progress=said.append)
    assert said == ["prefill: tracing", "prefill: compiling", "decode: tracing", "decode: compiling"]
    of_program = fxwrap.save(tmp_path / "program.fxw", program, progress=said.append, **how)
    assert said[4:] == ["writing"]
    of_methods = fxwrap.save(tmp_path / "methods.fxw", methods, options=options, **how)
    assert members_of(of_program) == members_of(of_methods)


def test_a_program_is_saved_as_it_is_now(tmp_path: Path, device: torch.device) -> None:
    """With what it and others have written to weights; recordings and calls change nothing of it."""
    model, x = Fill(a=torch.zeros(4, device=device)), torch.ones(4, device=device)
    program = fxwrap.aot_compile({"f": (model, (x,))}, **ALWAYS)
    for _ in range(4):
        program.f(x)
    model.a.mul_(10)
    loaded = fxwrap.load(fxwrap.save(tmp_path / "program.fxw", program), trust=True)
    assert torch.equal(loaded.f(x), torch.full_like(x, 82.0)) and torch.equal(program.f(x), torch.full_like(x, 82.0))
    loaded.f(x)
    assert torch.equal(program.weights["a"], torch.full_like(x, 41.0)), "the loaded program has memory of its own"


def test_a_program_outlives_the_cache_of_its_kernels(tmp_path: Path) -> None:
    # Of a size that no other test has: Inductor would find kernels that the process has loaded from another cache.
    model, x = Block().eval(), torch.randn(11, WIDTH)
    with fresh_cache():
        program = fxwrap.aot_compile({"f": (model, (x,))})
        expected = program.f(x)
        shutil.rmtree(cache_dir())
        with pytest.raises(StorageError, match=r"cache that was removed[\s\S]*source"):
            fxwrap.save(tmp_path / "program.fxw", program)
        fxwrap.save(tmp_path / "program.fxw", program, compile="source")
    assert torch.equal(program.f(x), expected)
    assert torch.equal(fxwrap.load(tmp_path / "program.fxw", trust=True).f(x), expected)


def test_what_is_no_program_to_save_or_no_method_to_compile(tmp_path: Path) -> None:
    path, x = tmp_path / "program.fxw", torch.ones(2, 4)
    program = fxwrap.aot_compile({"f": (nn.Linear(4, 4), (x,))})
    loaded = fxwrap.load(fxwrap.save(path, program), trust=True)
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"loaded from a file[\s\S]*copy the file"):
        fxwrap.save(path, loaded)
    with pytest.raises(OptionError, match="compiled"):
        fxwrap.save(path, program, options={"warmup": 3})
    with pytest.raises(OptionError, match="compile"):
        fxwrap.save(path, program, compile="binary")
    with pytest.raises(OptionError, match="weights"):
        fxwrap.save(path, program, weights="no")  # type: ignore[arg-type]
    assert path.read_bytes() == before
    linear = nn.Linear(4, 4)
    for methods, options in (
        ({}, None),
        (linear, None),
        (program, None),
        ({"f": linear}, None),
        ({"two words": (linear, (x,))}, None),
        ({"_private": (linear, (x,))}, None),
        ({1: (linear, (x,))}, None),
        # A method of such a name would be hidden behind the program's own.
        *(({name: (linear, (x,))}, None) for name in ("explain", "load_weights", "methods", "weights")),
        ({"f": (linear, (x,))}, {"warm": 1}),
    ):
        with pytest.raises(OptionError):
            fxwrap.aot_compile(methods, options=options)  # type: ignore[arg-type]
