"""The vocabulary of a host graph: the functions that its nodes call, and the kinds of nodes.

A host graph is a ``torch.fx.GraphModule`` whose nodes are, besides placeholders, constants and the output:

=========== ==================================================================================
allocation  ``torch.empty_strided(size, stride, dtype=..., device=...)``; ``meta["uninitialised"]`` if something may
            read it before anything writes it, as it may what ``torch.empty`` returns
launch      ``launch(kernel, *args)``: a compiled kernel writes into existing buffers
extern      a call of an ATen or custom operator; ``switch`` and ``while_loop``, which call subgraphs
view        ``reinterpret``, ``operator.getitem``, a dtype view: shares its operand's storage; ``aligned``,
            which copies an input that is not aligned, and whose result nothing writes to
symbolic    arithmetic on sizes
check       ``assert_size_stride`` and other asserts Inductor makes
=========== ==================================================================================

A host graph can be called (``gm(*inputs)``). Whatever fxwrap does with it computes what that call computes.
"""

from __future__ import annotations

import ctypes
import enum
import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

from .arithmetic import is_arithmetic
from .control_flow import control_flow_of, is_fake, switch, while_loop


class Kind(enum.Enum):
    PLACEHOLDER = "placeholder"
    CONSTANT = "constant"
    ALLOCATION = "allocation"
    LAUNCH = "launch"
    EXTERN = "extern"
    VIEW = "view"
    SYMBOLIC = "symbolic"
    CHECK = "check"
    OUTPUT = "output"


# Calls in the source of a kernel whose threads add, or meet, in any order: C++, Triton, CUDA and Metal.
_IN_ANY_ORDER = re.compile(
    r"\batomic_\w+\s*(<[^;()]*>)?\(|\batomic[A-Z]\w*\(|omp atomic|transpose_mxn<[^;()]*\btrue\b|decoupled_lookback"
)


@dataclass(eq=False)
class Kernel:
    """A compiled kernel, as host graphs hold it.

    Attributes:
        name: Inductor's name for it.
        language: "cpp", "triton", or the name of a vendor's kind of kernels.
        source: the code Inductor generated.
        device: where it runs.
        call: runs it on real arguments, on the current stream of its device.
        writes: positions among the launch's arguments that the kernel writes.
        definitions: the text of the module that defines it, with all kernels of one program.
        arg_types: types of the arguments as Inductor's scheduling gives them; None where it gives none.
    """

    name: str
    language: str
    source: str
    device: torch.device
    call: Callable[..., Any]
    writes: tuple[int, ...]
    definitions: str = ""
    arg_types: tuple[Any, ...] | None = None

    def __repr__(self) -> str:
        return f"<{self.language} kernel {self.name}>"

    @property
    def same_bits_again(self) -> bool:
        """Whether a second run on the same bytes gives the same bits; atomic adds round as they come."""
        return _IN_ANY_ORDER.search(self.source) is None

    @property
    def configurations(self) -> Sequence[Mapping[str, Any]]:
        """Triton's block sizes, warps and stages: the chosen configuration, or all candidates before tuning."""
        return getattr(self.call, "configurations", ())

    @property
    def address(self) -> int | None:
        """Where the machine code of a C++ kernel of the CPU is: in the module whose function calls it."""
        module = getattr(self.call, "__self__", None)
        if self.language != "cpp" or self.device.type != "cpu" or module is None:
            return None
        if (address := getattr(module, "address", None)) is not None:  # in a library of a saved file
            return int(address)
        try:
            return ctypes.cast(ctypes.CDLL(module.__file__).kernel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            return None


def launch(kernel: Kernel, *args: Any) -> None:
    """Run a compiled kernel. On fake tensors it does nothing, so that shapes can be propagated through a graph.

    A host graph launches kernels of every device through this function.
    """
    # A descriptor's tensor is its ``base``.
    if any(is_fake(getattr(arg, "base", arg)) for arg in args):
        return
    kernel.call(*args)


def reinterpret(base: torch.Tensor, size: Iterable[Any], stride: Iterable[Any], offset: Any = 0) -> torch.Tensor:
    """View ``base``'s storage with another layout, ``offset`` elements after base's own first element.

    ``torch.as_strided`` counts its offset from the start of the storage, which is wrong if ``base`` itself is a view
    (an input with a storage offset, a buffer inside an arena).
    """
    return torch.as_strided(base, tuple(size), tuple(stride), base.storage_offset() + offset)


# Bytes: Inductor's kernels for GPUs may assume that inputs begin at a multiple of this.
INPUT_ALIGNMENT = 16


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The input itself, or a copy if its memory does not begin at a multiple of ``INPUT_ALIGNMENT``."""
    if is_fake(tensor) or is_aligned(tensor):
        return tensor
    size, stride = tensor.size(), tensor.stride()
    extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if tensor.numel() else 0
    copy = torch.as_strided(tensor, (extent,), (1,), tensor.storage_offset()).clone()
    return torch.as_strided(copy, size, stride)


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % INPUT_ALIGNMENT == 0


def check(condition: Any, message: Any = "") -> None:
    """Raise AssertionError unless ``condition``: an ``assert`` statement of Inductor's wrapper."""
    if not condition:
        raise AssertionError(message)


def require(condition: Any, message: str) -> None:
    """Raise RuntimeError unless ``condition``: what the user asserted of a data-dependent number."""
    if not condition:
        raise RuntimeError(message)


# Their results may be unused: without this, dead code elimination in a user's pass would drop them.
for function in (launch, check, require, switch, while_loop):
    has_side_effect(function)


def format_text(text: str, *args: Any, **kwargs: Any) -> str:
    """``str.format`` as a function: a node calls functions, not methods."""
    return text.format(*args, **kwargs)


# The functions that host graphs call besides operators and Python's own.
FUNCTIONS = (launch, reinterpret, aligned, check, require, switch, while_loop, format_text)
_VIEWS = {reinterpret, aligned, operator.getitem, torch.ops.aten.as_strided.default, torch.ops.aten.view.dtype}


def is_work(node: Node) -> bool:
    """Whether a node does something at run time (a launch or an extern call)."""
    return kind_of(node) in (Kind.LAUNCH, Kind.EXTERN)


def kind_of(node: Node) -> Kind:
    """The kind of a host-graph node. Emission sets ``node.meta["kind"]`` where the target does not determine it."""
    if node.op == "placeholder":
        return Kind.PLACEHOLDER
    if node.op == "output":
        return Kind.OUTPUT
    if node.op == "get_attr":
        return Kind.CONSTANT
    marked = node.meta.get("kind")
    if marked is not None:
        return marked
    if node.target is launch:
        return Kind.LAUNCH
    if node.target is torch.empty_strided:
        return Kind.ALLOCATION
    if node.target in (check, require):
        return Kind.CHECK
    if node.target is operator.getitem:
        # An index into a tuple of sizes is arithmetic; into a tuple of tensors, a view.
        return Kind.SYMBOLIC if is_symbolic_value(node.meta.get("val")) else Kind.VIEW
    if node.target in _VIEWS:
        return Kind.VIEW
    of_shape = is_arithmetic(node.target) or node.target in _SHAPE_READERS  # others read data, as ``.item()``
    if is_symbolic_value(node.meta.get("val")) and of_shape:
        return Kind.SYMBOLIC
    return Kind.EXTERN


def counts_from_storage(node: Node) -> bool:
    """Whether a call addresses elements from the start of its operand's storage.

    The storage may start before the operand's first element; the call may then read bytes outside of the operand.
    """
    if node.op != "call_function" or (overload := schema_of(node)) is None:
        return False
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name == "storage_offset":
            offset = node.kwargs.get("storage_offset", node.args[position] if position < len(node.args) else None)
            return offset is not None
    return False


def by_name(gm: GraphModule) -> dict[str, Node]:
    """The nodes of a graph by name."""
    return {node.name: node for node in gm.graph.nodes}


def nodes_in(value: Any) -> list[Node]:
    """The nodes inside a (nested) argument."""
    nodes: list[Node] = []

    def note(node: Node) -> Node:
        nodes.append(node)
        return node

    torch.fx.map_arg(value, note)
    return nodes


def is_symbolic_value(value: Any) -> bool:
    """Whether a value is a number, symbolic or not."""
    return isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool))


_SHAPE_READERS = {
    torch.ops.aten.sym_size.int,
    torch.ops.aten.sym_stride.int,
    torch.ops.aten.sym_numel.default,
    torch.ops.aten.sym_storage_offset.default,
}


def schema_of(node: Node) -> torch._ops.OpOverload | None:
    """The operator overload whose schema describes the call; None if there is none."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target
    return node.meta.get("op_overload")


def operator_name(node: Node) -> str:
    """The name of a node's operation in reports: ``aten::nonzero``, or the name of a kernel or a function."""
    kernel = kernel_of(node)
    if kernel is not None:
        return kernel.name
    overload = schema_of(node)
    if overload is not None:
        return overload._schema.name
    if isinstance(node.target, torch._ops.OpOverloadPacket):
        return str(node.target._qualified_op_name)
    return getattr(node.target, "__name__", str(node.target))


def only_computes(node: Node) -> bool:
    """Whether a node runs no foreign code, such as a custom operator, which may do anything and keep operands."""
    if (flow := control_flow_of(node)) is not None:
        return all(only_computes(inner) for gm in flow.subgraphs for inner in gm.graph.nodes)
    overload = schema_of(node)
    return kind_of(node) is not Kind.EXTERN or (overload is not None and overload.namespace in _COMPUTING)


_COMPUTING = ("aten", "mkldnn", "onednn")
_COMMUNICATION = ("c10d", "_c10d_functional", "_dtensor", "symm_mem")


def communicates(node: Node) -> bool:
    """Whether a node communicates with other processes, in program order."""
    overload = schema_of(node)
    return overload is not None and overload.namespace in _COMMUNICATION


def waits(node: Node) -> bool:
    """Whether a node waits for the end of the communication that fills its operands.

    A functional collective returns at once. Until the wait it reads its operands, and no other node may read or write
    what it fills. Schemas declare neither this nor that waiting returns the operand itself.
    """
    overload = schema_of(node)
    return overload is not None and overload._schema.name in _WAITS


_WAITS = ("_c10d_functional::wait_tensor", "_c10d_functional::wait_tensors")


def gathers(node: Node) -> bool:
    """Whether a node begins a communication that puts together the parts of all processes, and writes no operand."""
    overload = schema_of(node)
    return overload is not None and overload._schema.name == "_c10d_functional::all_gather_into_tensor"


def must_be_awaited(node: Node) -> bool:
    """Whether a node begins a communication that ends only with a wait for it."""
    overload = schema_of(node)
    return overload is not None and overload.namespace == "_c10d_functional" and not waits(node)


def receives(node: Node) -> bool:
    """Whether a node writes its operands without declaring it in its schema."""
    overload = schema_of(node)
    return overload is not None and overload._schema.name in _RECEIVERS


_RECEIVERS = ("_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops")


def kernel_of(node: Node) -> Kernel | None:
    """The kernel that a launch runs; None for other nodes."""
    if node.op != "call_function" or node.target is not launch:
        return None
    handle = node.args[0]
    if not isinstance(handle, Node) or node.graph.owning_module is None:
        return None
    return getattr(node.graph.owning_module, str(handle.target))


def device_of(node: Node) -> torch.device | None:
    """The device that a node's work runs on; None for arithmetic on the host."""
    kernel = kernel_of(node)
    if kernel is not None:
        return kernel.device
    for value in (node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)):
        tensors = value if isinstance(value, (tuple, list)) else (value,)
        devices = [t.device for t in tensors if isinstance(t, torch.Tensor)]
        # An operator with operands on several devices runs on the accelerator.
        for device in sorted(devices, key=lambda d: d.type == "cpu"):
            return device
    return None


def aligned_inputs(gm: GraphModule) -> frozenset[int]:
    """Positions of the inputs that kernels read through ``aligned``, because they assume an alignment."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    return frozenset(p for p, node in enumerate(placeholders) if any(u.target is aligned for u in node.users))


def output_values(gm: GraphModule) -> list[Any]:
    """The results of a graph by position: nodes and plain values."""
    values = output_node(gm).args[0]
    return list(values) if isinstance(values, (list, tuple)) else [values]


def output_node(gm: GraphModule) -> Node:
    """The node that returns the host graph's results."""
    return next(node for node in reversed(gm.graph.nodes) if node.op == "output")


def constants(gm: GraphModule) -> dict[Node, Any]:
    """The values of a host graph's attributes: constants, kernels, subgraphs."""
    return {node: operator.attrgetter(str(node.target))(gm) for node in gm.graph.nodes if node.op == "get_attr"}


def _uses(node: Node, exclude: Container[Node] = ()) -> list[Node]:
    """The users of a value, and of its views and of arithmetic on its sizes, the nearest first."""
    users = [user for user in node.users if user not in exclude]
    seen = set(users)
    for user in users:
        if kind_of(user) in (Kind.VIEW, Kind.SYMBOLIC):
            further = [one for one in user.users if one not in seen]
            users += further
            seen.update(further)
    return users


def effective_users(node: Node, exclude: Container[Node] = ()) -> set[Node]:
    """The nodes that use a value, directly or through views and arithmetic, which are made again for each use.

    Args:
        exclude: direct users to ignore.
    """
    return {user for user in _uses(node, exclude) if kind_of(user) not in (Kind.VIEW, Kind.SYMBOLIC, Kind.CHECK)}


def checks_layout(node: Node) -> bool:
    """Whether a check reads only the sizes and strides of a tensor."""
    return getattr(node.target, "__name__", "") == "assert_size_stride"


def checks_alignment(node: Node) -> bool:
    """Whether a check looks at nothing but the address of a tensor."""
    return getattr(node.target, "__name__", "") == "assert_alignment"


def checks_on(nodes: Sequence[Node]) -> list[Node]:
    """The asserts on ``nodes``, on views of them and on their sizes. They can run once the nodes have run."""
    return list(dict.fromkeys(user for node in nodes for user in _uses(node) if kind_of(user) is Kind.CHECK))


def same_bits_again(node: Node) -> bool:
    """Whether a node that runs again on the same bytes gives the same bits, as far as is known."""
    if (kernel := kernel_of(node)) is not None:
        return kernel.same_bits_again
    if (flow := control_flow_of(node)) is not None:
        return all(same_bits_again(inner) for gm in flow.subgraphs for inner in gm.graph.nodes)
    overload = schema_of(node)
    if overload is None:
        return True
    if getattr(torch.Tag, "nondeterministic_bitwise", None) in overload.tags:  # from torch 2.13 on
        return False
    device = device_of(node)
    on_host = device is None or device.type == "cpu"
    return on_host or _ADDS_IN_ANY_ORDER.search(overload._schema.name) is None


# Operators whose kernels on accelerators add with atomics, or may. Torch has no tag on them.
_ADDS_IN_ANY_ORDER = re.compile(r"::_?(index_add|index_put|index_reduce|scatter|put|bincount|histc)|_backward\b")


def draws_numbers(node: Node) -> bool:
    """Whether a node's operator draws random numbers. Attention is tagged so, and draws none without dropout."""
    overload = schema_of(node)
    if overload is None or torch.Tag.nondeterministic_seeded not in overload.tags:
        return False
    for place, argument in enumerate(overload._schema.arguments):
        if argument.name == "dropout_p":
            given = node.kwargs.get(argument.name, argument.default_value)
            return bool((node.args[place] if place < len(node.args) else given) != 0)
    return True
