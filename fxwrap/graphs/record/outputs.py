"""The last part of a replay, which hands out the outputs.

An output is handed out in one of three ways: uncopied, and then its use count is watched; copied; or as a view of the
caller's own input.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping, Sequence
from typing import Any, cast

import torch
from torch.fx import Node

from ...host_graph.nodes import Kind, kind_of, output_node
from ...host_graph.tensors import has_address, tensors_in
from ...torch_private.functions import lay_out, share_copies
from ..memory.live_outputs import OutputStorage
from ..memory.output_views import clones_alike, copies_out, each, relay, relay_shared, shares_storage, views_of
from ..replay.flat_python import Part
from ..replay.operands import Bound, Register
from ..replay.recording import RecordingRequest
from ..replay.steps import CallOperator, CallPython, View
from .flat import FlatBuilder
from .layout import Layout


class Outputs:
    """The outputs of one recording.

    Args:
        registers: the register of each value that changes from call to call.
        values: the contents of the registers in the recorded call.
        pooled: nodes whose results lie in the graph pool. Outputs among them are copied: a later capture may get the
            same bytes.

    Attributes:
        storages: the storages that are handed out uncopied; they are to be watched.
    """

    def __init__(
        self,
        request: RecordingRequest,
        layout: Layout,
        registers: Mapping[Node, int],
        values: Sequence[Any],
        pooled: frozenset[Node],
    ) -> None:
        self._request, self._layout, self._registers, self._values = request, layout, registers, values
        self._pooled, self._plan = pooled, request.sized.plan
        self._freezes_addresses = request.runtime.frozen_addresses
        self.storages: list[OutputStorage] = []

    def part(self, builder: FlatBuilder, common: Mapping[Node, Any]) -> Part:
        """Make the part that returns the outputs.

        Args:
            builder: a builder that binds numbers and constants only.
            common: values that are the same at every call.
        """
        output = output_node(self._plan.graph)
        own = {node for node in self._registers if node in common}
        for node, users in _made_of(output, own).items():
            indices = self._plan.facts.of(node)
            makers = map(self._plan.maker, indices & self._request.memory.outputs)
            memory = [self._layout.tensors[maker] for maker in makers if maker in self._layout.tensors]
            planned = bool(memory) and node in self._layout.tensors
            value: Bound | Register
            if planned:
                value, owned = Bound(self._layout.tensors[node]), memory
            elif node.op == "placeholder" or node not in self._registers:
                continue
            elif (position := self._aliased_input(node)) is not None:
                # The result aliases an input: the output is a view of the caller's own tensor.
                given = builder.register(self._plan.placeholders[position])
                seen = self._layout.input_tensors[position]
                if node in common:  # laid out in the same way at every call
                    views = views_of(common[node], seen.data_ptr())
                    builder.assign(node, CallPython(functools.partial(relay, views), (given,)))
                else:
                    shared = functools.partial(relay_shared, seen)
                    builder.assign(node, CallPython(shared, (builder.register(node), given)))
                continue
            elif self._freezes_addresses and node in common:
                # At a fixed address: a static buffer, a placed result, or the pool.
                value, owned = Bound(common[node]), tensors_in(common[node])
            elif memory:
                value, owned = builder.register(node), memory  # an operator returned planned memory
            else:
                continue  # new at every call
            fake = node.meta.get("val")
            # A sparse tensor's components are not outputs themselves.
            has_no_address = isinstance(fake, torch.Tensor) and not has_address(fake)
            copy = bool(indices & self._request.copied) or node in self._pooled or has_no_address
            laid_out = (
                not copy
                and self._freezes_addresses
                and isinstance(value, Bound)
                and self._lay_out_views(builder, node, value.value, output)
            )
            if copy:
                builder.assign(node, _copy(value))
            elif laid_out or (planned and all(user.meta.get("call") is lay_out for user in users)):
                builder.stand_for(node, value)  # every user makes a new tensor over it
            elif planned:
                builder.assign(node, self._like(value, self._layout.tensors[node]))
            else:
                alias = functools.partial(each, _alias)
                builder.assign(node, CallPython(alias, (value,)))
            if not copy:
                self._watch(owned, indices)
        return builder.build(output.args[0])

    def _like(self, value: Bound | Register, tensor: torch.Tensor) -> View:
        """A new tensor over the memory of ``value``, laid out as ``tensor``."""
        size, stride = Bound(tuple(tensor.size())), Bound(tensor.stride())
        return View(lay_out, value, size, stride)

    def _lay_out_views(self, builder: FlatBuilder, node: Node, value: Any, output: Node) -> bool:
        """Make outputs that are views of ``value`` as new tensors over its memory, which does not move.

        A view operator's result also refers to its base, and would raise the use count by which an output is live.

        Returns:
            Whether all outputs that are made of ``value`` are new tensors over its memory now.
        """
        new = output not in node.users
        known = {**builder.bound, node: value}
        for view in _views_in(node, output):
            if not all(arg in known for arg in view.all_input_nodes):
                new = False
                continue
            args, kwargs = torch.fx.map_arg((view.args, view.kwargs), known.__getitem__)
            call = view.meta.get("call", view.target)
            known[view] = made = call(*args, **kwargs)
            if call is lay_out or output not in view.users:
                continue
            if isinstance(made, torch.Tensor) and has_address(made):
                builder.assign(view, self._like(Bound(made), made))
            else:
                new = False
        return new

    def _aliased_input(self, node: Node) -> int | None:
        """Position of the input that a result aliases (its memory, or its static buffer), declared or not."""
        value = self._values[self._registers[node]]
        return next((p for p, seen in self._layout.input_tensors.items() if shares_storage(seen, value)), None)

    def _watch(self, tensors: Sequence[torch.Tensor], indices: frozenset[int]) -> None:
        known = {output.storage.data_ptr() for output in self.storages}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known or not storage.nbytes():
                share_copies(storage)
                device, low = self._layout.in_arenas.get(storage._cdata, (None, 0))
                self.storages.append(OutputStorage(storage, indices, device, low))

    def in_inference_mode(self, outputs: Any, inputs: Sequence[Any]) -> Any:
        """Outputs of this call as inference tensors. Recording runs outside inference mode; replays do not."""
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in(list(inputs))}

        def made(tensor: torch.Tensor) -> torch.Tensor:
            theirs = tensor.is_inference() or not has_address(tensor) or tensor.untyped_storage()._cdata in given
            return tensor if theirs else _alias(tensor)

        return each(made, outputs)


def _made_of(output: Node, own: Container[Node]) -> dict[Node, list[Node]]:
    """The values behind the outputs that are not views, each with its users on the way to ``output``.

    A user is ``output`` itself, or a view of the value.

    Args:
        own: values that have an address of their own: one element of a tuple, for example, that is copied to a static
            buffer where another element is a number that varies.
    """
    users_of: dict[Node, list[Node]] = {}
    queue = [output]
    for user in queue:
        for node in user.all_input_nodes:
            if node not in users_of and kind_of(node) is Kind.VIEW and node not in own:
                queue.append(node)
            users_of.setdefault(node, []).append(user)
    return {node: users for node, users in users_of.items() if kind_of(node) is not Kind.VIEW or node in own}


def _views_in(node: Node, output: Node) -> list[Node]:
    """The views of a value that ``output`` needs, bases first."""
    values, needed = [node], {output}
    for value in values:
        values += [user for user in value.users if kind_of(user) is Kind.VIEW and user not in values]
    for value in reversed(values):
        if not needed.isdisjoint(value.users):
            needed.add(value)
    return [view for view in values[1:] if view in needed]


def _copy(value: Bound | Register) -> CallPython:
    """Copies a value, with its strides and pending bits. The dispatcher's ``clone`` needs no Python."""
    clone = torch.ops.aten.clone.default
    if isinstance(value, Bound) and clones_alike(value.value):
        return CallOperator(clone, (value,), overload=clone)
    return CallPython(copies_out, (value,))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    if not has_address(tensor):
        return tensor
    return cast(torch.Tensor, lay_out(tensor, tuple(tensor.size()), tensor.stride(), 0))
