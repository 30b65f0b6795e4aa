"""Traces a function as it stands: torch's own ``make_fx`` over fake values of the caller's tensors.

::

    step(x, y)            runs once as Python, with autograd's engine, hooks and the optimizer's own code
      world(x)            a parameter is met: the trace has an input for it, and computes with a fake value of it
      loss.backward()     autograd runs; what it computes is traced
      optimizer.step()    writes to parameters are traced; the parameters themselves keep what they hold

Modules and optimizers stay the objects that they are, with their hooks, tied weights and caches of parameters: only
the numbers are fake. A fake value's number is not known, so that a decision on data is an error.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import linecache
import traceback
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.eval_frame import innermost_fn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import (
    SYMPY_INTERP,
    DimDynamic,
    GuardOnDataDependentSymNode,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ....backend import fxwrap
from ....codegen.devices.patches import Patches
from ....graphs.compilation import Compilation
from ....graphs.memory.locks import lock_of_process
from ....host_graph.user_code import last_frame, of_user
from ..written.step_if import predicated
from .random_numbers import RandomNumbers
from .tracing_state import is_fake, without_autocast
from .wrapped_tensors import any_wraps, storage_of

DATA_DECIDES = DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode
# What a fake tensor raises that was given memory elsewhere, as by ``.data = ...``; older torch has none.
MOVED: type[Exception] = getattr(fake_tensor, "FakeTensorDeviceMismatchError", DataDependentOutputException)
# One trace at a time, with its compilation: torch's settings for it are the process's.
TRACING = lock_of_process()


@dataclass(frozen=True, eq=False)
class Traced:
    """A function as a graph of operators.

    Attributes:
        gm: takes the tensors, then the leaves of the call that are tensors; returns what the function returned.
        examples: fake values of what it takes.
        unknown: real tensors that the function used and that are no input, each with the line that used it.
        given: how many of the inputs are leaves of the call.
        varies: whether it is for other sizes of these, too.
        writes_given: whether it writes to one of these, or to memory in which one lies.
        faults: what the function does with random numbers that no program does.
        only_read: the lines that read numbers of tensors with which the trace computes nothing.
        made: the values that its operators have returned.
    """

    gm: GraphModule
    examples: Sequence[torch.Tensor]
    unknown: Sequence[tuple[torch.Tensor, str]]
    given: int
    varies: bool
    writes_given: bool
    faults: Sequence[str]
    only_read: Sequence[str]
    made: Sequence[weakref.ref[torch.Tensor]]

    def is_used(self, position: int) -> bool:
        """Whether the function has used an input."""
        return bool(self.gm.graph.find_nodes(op="placeholder")[position].users)

    def without(self, positions: Sequence[int]) -> Traced:
        """The same without some inputs, which are not used."""
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        for position in positions:
            self.gm.graph.erase_node(placeholders[position])
        self.gm.recompile()
        examples = [value for place, value in enumerate(self.examples) if place not in positions]
        return replace(self, examples=examples)

    def left_behind(self) -> list[str]:
        """Where values of the trace are left, apart from the trace itself: what a replay would not renew.

        It is called when everything is put back that is known to have changed.
        """
        called = {
            one.target.namespace for one in self.gm.graph.nodes if isinstance(one.target, torch._ops.OpOverload)
        }
        if called - _OF_TORCH:
            return []  # an operator of others may keep what it was given
        graphs = [module.graph for module in self.gm.modules() if isinstance(module, GraphModule)]
        notes = [node.meta for graph in graphs for node in graph.nodes]
        own = {id(value) for value in tree_leaves([*self.examples, *notes])}
        if not self._alive(own):
            return []
        gc.collect()  # it takes long in a large process
        left = self._alive(own)
        # What only torch holds, nobody sees.
        return [owner for one in left if (owner := _owner(one, left))]

    def _alive(self, besides: Collection[int]) -> list[torch.Tensor]:
        values = (reference() for reference in self.made)
        return [value for value in values if value is not None and id(value) not in besides]

    def rounding(self) -> float:
        """The relative rounding of the least precise floating-point numbers in the graph; 0 if it has none."""
        values = (value for node in self.gm.graph.nodes for value in tree_leaves(node.meta.get("val")))
        dtypes = {value.dtype for value in values if isinstance(value, torch.Tensor)}
        return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)

    def sizes_hold(self) -> Callable[[Sequence[torch.Tensor]], bool]:
        """Whether what was decided by sizes, in the trace and when it was compiled, holds for other arguments.

        It is called when the trace is compiled. Sizes that do not vary are not looked at.
        """
        if not self.varies:
            return lambda given: True
        given: Any = self.examples[len(self.examples) - self.given :]
        environment = given[0].fake_mode.shape_env
        code = environment.produce_guards_expression(given) or "True"
        names, compiled_code = [f"t{place}" for place in range(self.given)], compile(code, "<sizes>", "eval")
        return lambda given: bool(eval(compiled_code, SYMPY_INTERP, {"L": dict(zip(names, given, strict=True))}))


def traced(
    function: Callable[[Sequence[torch.Tensor], Callable[[torch.Tensor], bool]], Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor],
    varying: Sequence[Collection[int]],
) -> Traced:
    """Trace a function, which computes with ``tensors`` themselves, and gets fake values of ``given``.

    Nothing is written to any of them.

    Args:
        function: its second argument tells whether one of ``tensors`` was used by now.
        varying: for each of ``given``, the dimensions whose sizes may be others at another call.

    Raises:
        Exception: what the function raises; ``DATA_DECIDES`` where it reads numbers from tensors.
    """
    varies = any(varying)
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=not varies)
    unknown: list[tuple[torch.Tensor, str]] = []
    random, written, read = RandomNumbers(), set[int](), dict[str, str]()
    made: list[weakref.ref[torch.Tensor]] = []

    def with_fakes(*inputs: torch.Tensor) -> list[torch.Tensor]:
        tracer: Any = get_proxy_mode().tracer  # type: ignore[union-attr]
        fakes = {id(tensor): fake for tensor, fake in zip(tensors, inputs, strict=False)}
        # Now, as what writes to an input takes its place in the trace.
        nodes: dict[int, Any] = {key: get_proxy_slot(fake, tracer) for key, fake in fakes.items()}
        nodes = {key: slot.proxy.node for key, slot in nodes.items()}

        def is_used(tensor: torch.Tensor) -> bool:
            return bool(nodes[id(tensor)].users)

        substitution = _InPlaceOf(fakes, unknown, random, written, read, made, mode)
        with Patches() as patches, substitution:
            random.patch(patches, lambda: substitution in _get_current_dispatch_mode_stack())
            return list(function(inputs[len(tensors) :], is_used))

    with _as_in_a_compiler(), mode, enable_python_dispatcher():
        examples: list[torch.Tensor] = [mode.from_tensor(tensor, static_shapes=True) for tensor in tensors]
        examples += [_with_sizes(mode, *one) for one in zip(given, varying, strict=True)]
        _without_gradients(examples)
        gm = make_fx(with_fakes, tracing_mode="real", record_stack_traces=True, _allow_non_fake_inputs=True)(
            *examples
        )
    random.forget()
    _without_gradients(examples)
    _remove_ranges(gm)
    held = [(getattr(gm, str(node.target)), node) for node in gm.graph.find_nodes(op="get_attr")]
    unknown += [(value, last_frame(node.meta.get("stack_trace") or "")) for value, node in held if is_fake(value)]
    writes_given = not written.isdisjoint(map(storage_of, examples[len(tensors) :]))
    used = {node.name for node in gm.graph.nodes if node.users}
    only_read = list(dict.fromkeys(line for name, line in read.items() if name not in used))
    return Traced(gm, examples, unknown, len(given), varies, writes_given, random.faults, only_read, made)


def _owner(value: torch.Tensor, besides: list[Any]) -> str:
    """The kind of a Python object that holds a value; empty if none does."""
    owners = [one for one in gc.get_referrers(value) if one is not besides and not isinstance(one, types.FrameType)]
    return f"an object of type {type(owners[0]).__name__}" if owners else ""


def _without_gradients(values: Iterable[torch.Tensor]) -> None:
    for value in values:
        if value.is_leaf:
            value.grad = None


def _with_sizes(mode: FakeTensorMode, tensor: torch.Tensor, varying: Collection[int]) -> torch.Tensor:
    """The fake value of a tensor, some of whose sizes are symbols."""
    if not varying:
        return mode.from_tensor(tensor, static_shapes=True)
    sizes = [DimDynamic.DYNAMIC if dim in varying else DimDynamic.STATIC for dim in range(tensor.dim())]
    return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))


class _InPlaceOf(TorchDispatchMode):
    """Gives operators the fake values of real tensors.

    Args:
        fakes: by the ids of the real tensors.
        unknown: gets real tensors that have no fake value, each with the line that uses it.
        random: draws random numbers.
        written: gets the storages of fake values that are written.
        read: gets the lines that read numbers of tensors, by names of nodes.
        made: gets what operators return.
    """

    # Such as ``torch.cond``. A branch may use operands only.
    supports_higher_order_operators = True

    def __init__(
        self,
        fakes: Mapping[int, torch.Tensor],
        unknown: list[tuple[torch.Tensor, str]],
        random: RandomNumbers,
        written: set[int],
        read: dict[str, str],
        made: list[weakref.ref[torch.Tensor]],
        mode: FakeTensorMode,
    ) -> None:
        super().__init__()
        self._fakes, self._unknown, self._random, self._mode = fakes, unknown, random, mode
        self._written, self._read, self._made = written, read, made

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if any_wraps(types):
            return NotImplemented  # it calls operators on what is inside
        if func in _OF_CONSTANTS:
            return func(*args, **(kwargs or {}))
        given_args, given_kwargs = tree_map_only(torch.Tensor, self._fake, (tuple(args), dict(kwargs or {})))
        if func is torch.ops.higher_order.cond:
            return _branched(*given_args)
        if (schema := getattr(func, "_schema", None)) is not None and schema.is_mutable:
            values = itertools.zip_longest(schema.arguments, given_args)
            written = [given_kwargs.get(argument.name, value) for argument, value in values if argument.is_write]
            self._written.update(storage_of(one) for one in tree_leaves(written) if isinstance(one, torch.Tensor))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            result = self._random.draw(func, given_args, given_kwargs)
        else:
            result = func(*given_args, **given_kwargs)
        self._made += (weakref.ref(one) for one in tree_leaves(result) if isinstance(one, FakeTensor))
        if func is _READS_A_NUMBER:
            nodes = reversed(get_proxy_mode().tracer.graph.nodes)  # type: ignore[union-attr]
            name = next(node.name for node in nodes if node.target is func)
            self._read[name] = user_place(traceback.walk_stack(None))
        # An operator that works in place returns what it was given.
        return args[0] if args and isinstance(result, torch.Tensor) and result is given_args[0] else result

    def _fake(self, value: torch.Tensor) -> torch.Tensor:
        if isinstance(value, FakeTensor):
            return value
        fake = self._fakes.get(id(value))
        if fake is None:
            # The trace goes on, so that nothing is written to the tensor, and is refused then.
            self._unknown.append((value, user_place(traceback.walk_stack(None))))
            return self._mode.from_tensor(value, static_shapes=True)
        return fake


def _branched(condition: Any, true: Callable[..., Any], false: Callable[..., Any], operands: Any) -> Any:
    """``torch.cond`` with branches that return tuples, which Inductor asks for, and Dynamo makes."""
    structures = []

    def tupled(branch: Callable[..., Any]) -> Callable[..., tuple[Any, ...]]:
        def run(*args: Any) -> tuple[Any, ...]:
            leaves, structure = tree_flatten(branch(*args))
            structures.append(structure)
            return tuple(leaves)

        return run

    results = torch.ops.higher_order.cond(condition, tupled(true), tupled(false), operands)
    return tree_unflatten(list(results), structures[-1])


_OF_TORCH = {"aten", "prims", "prim", "_c10d_functional", "_dtensor", "higher_order", "mkldnn", "quantized"}
_READS_A_NUMBER = torch.ops.aten._local_scalar_dense.default
# What ``torch.tensor(3.0)`` calls with the constant.
_OF_CONSTANTS = torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default


def is_tracing() -> bool:
    """Whether this thread is in a trace of a step."""
    return any(isinstance(mode, _InPlaceOf) for mode in _get_current_dispatch_mode_stack())


def user_place(frames: Iterable[tuple[Any, int]]) -> str:
    """The first of some frames that is in code of the user's, as ``file, line 3: code``; empty if none is."""
    places = (f"{file}, line {line}: {linecache.getline(file, line).strip()}" for file, line in of_user(frames))
    return next(places, "")


def compiled(
    traced: Traced, names: Sequence[str], options: Any, compilation: Compilation
) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """Compile a trace with fxwrap.

    Args:
        names: what reports call the inputs; those that it names stay where they are, the others move.
    """
    gm, constants = traced.gm, _lifted(traced.gm)
    names = [*(f"constant {number}" for number in range(len(constants))), *names]
    # What Dynamo tells AOTAutograd of its graphs, in torch's older and newer versions.
    gm.meta |= {"dynamo_compile_id": None, "dynamo_flat_name_to_original_fqn": {}}
    gm._param_name_to_source = {}  # type: ignore[assignment]
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node._dynamo_source = None
        if position < len(names):
            node.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
            node.meta["grapharg"] = _Argument(_Source(names[position]))
    with torch.no_grad(), without_autocast():
        run: Any = fxwrap(gm, [*constants, *traced.examples], options=options, compilation=compilation)
    # Without the wrapper by which Dynamo leaves a function alone: no frame evaluation is on around a step.
    run = innermost_fn(run)
    return functools.partial(run, *constants) if constants else run  # type: ignore[no-any-return]


def _lifted(gm: GraphModule) -> list[torch.Tensor]:
    """Make inputs, before all others, of the constants that a graph holds (``torch.tensor(3.0)``). Returns them."""
    constants: dict[str, torch.Tensor] = {}
    first = next(iter(gm.graph.nodes))
    for node in gm.graph.find_nodes(op="get_attr"):
        if isinstance(value := getattr(gm, str(node.target)), torch.Tensor):
            if str(node.target) not in constants:
                with gm.graph.inserting_before(first):
                    placeholder = gm.graph.placeholder(str(node.target))
                constants[str(node.target)] = value.detach()
            placeholder = next(p for p in gm.graph.find_nodes(op="placeholder") if p.target == str(node.target))
            node.replace_all_uses_with(placeholder)
            gm.graph.erase_node(node)
    for name in constants:
        delattr(gm, name)
    gm.recompile()
    return list(constants.values())


@dataclass(frozen=True)
class _Source:
    name: str


@dataclass(frozen=True)
class _Argument:
    source: _Source


@contextlib.contextmanager
def _as_in_a_compiler() -> Iterator[None]:
    """Inside the context, code of torch's takes the forms that a compiler can trace."""
    with Patches() as patches, torch.compiler.set_stance("force_eager"):
        patches.put(torch.compiler, "_is_compiling_flag", True)
        # ``nn.LSTM`` in torch's own operators: the one of oneDNN's has no gradient in a graph.
        patches.put(torch._C, "_get_mkldnn_enabled", lambda: False)
        # Whether arguments are valid is a question to data.
        patches.put(torch.distributions.Distribution, "_validate_args", False)
        patches.put(torch.amp.GradScaler, "_maybe_opt_step", _step_of_scaler)
        yield


def _step_of_scaler(_: Any, optimizer: Any, found: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
    """``GradScaler``'s decision to skip a step, which it makes on the host."""
    counts = list(found["found_inf_per_device"].values())
    predicated(sum(count.to(counts[0].device) for count in counts) == 0, optimizer, *args, **kwargs)


def _remove_ranges(gm: GraphModule) -> None:
    """Take ranges of profiles, which optimizers make, out of a graph."""
    ranges = [node for node in gm.graph.nodes if node.op == "call_function" and "profiler" in str(node.target)]
    for node in reversed(ranges):
        gm.graph.erase_node(node)
    gm.recompile()
