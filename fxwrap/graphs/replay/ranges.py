"""Names of a program's ranges in profiles; reports use the same names."""

from __future__ import annotations

from torch.fx import Node

from ...host_graph.nodes import operator_name
from ...host_graph.user_code import module_path


def work_range(node: Node) -> str:
    """A launch or a library call: ``layers.3.mlp: cpp_fused_gelu_7``, or without a module only its name."""
    module, name = module_path(node), operator_name(node)
    return f"{module}: {name}" if module else name


def partition_range(program: str, index: int) -> str:
    """The run of a partition."""
    return f"{program}, partition {index}"


def copies_after(program: str, index: int) -> str:
    """Copies of an eager partition's results to the addresses at which graphs read them."""
    return f"{program}, copies after partition {index}"


def copies_of_inputs(program: str) -> str:
    """Copies of inputs to their static buffers."""
    return f"{program}, copies of inputs"


def copies_to_inputs(program: str) -> str:
    """Copies of written static buffers back to the inputs."""
    return f"{program}, copies to inputs"


def recording(program: str) -> str:
    """The recording of a call."""
    return f"{program}, recording"
