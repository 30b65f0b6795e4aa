"""Rewrite: multiplies before it adds, where Inductor would lose the factor of a sum with a product of matrices."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

_aten = torch.ops.aten


def multiply_before_adding(gm: GraphModule) -> None:
    """Replace ``add(a, b, alpha=c)`` by ``add(a, b * c)`` where a product of matrices is added, in place.

    Inductor makes one call of the sum and the product (``addmm``), and leaves ``alpha`` out (torch 2.11 to 2.15): an
    optimizer that decays weights by the gradient would take ``weight_decay`` for 1 where both are in one graph.
    A kernel computes the same for both forms.

    ::

        product = aten.mm(x, y)                          product = aten.mm(x, y)
        z = aten.add(product, w, alpha=0.1)      ->      scaled = aten.mul(w, 0.1)
                                                         z = aten.add(product, scaled)
    """
    changed = False
    for node in gm.graph.find_nodes(op="call_function", target=_aten.add.Tensor):
        alpha = node.kwargs.get("alpha", 1)
        if alpha == 1 or not any(_is_product(operand) for operand in node.args):
            continue
        first, second = node.args
        with gm.graph.inserting_before(node):
            scaled = gm.graph.call_function(_aten.mul.Tensor, (second, alpha))
        scaled.meta = {key: value for key, value in second.meta.items() if key != "eager_input_vals"}
        node.args, node.kwargs = (first, scaled), {k: v for k, v in node.kwargs.items() if k != "alpha"}
        changed = True
    if changed:
        gm.recompile()


def _is_product(operand: object) -> bool:
    return isinstance(operand, Node) and operand.target is _aten.mm.default
