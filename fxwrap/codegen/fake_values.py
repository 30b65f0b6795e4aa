"""What stands for the tensors and sizes of a stored host graph: fake tensors, as in one that was just emitted."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges
from torch.utils._traceback import CapturedTraceback

from ..host_graph.graph_json import Layout


class FakeValues:
    """Fake tensors over storages of their own; sizes are symbols of an environment of their own."""

    def __init__(self) -> None:
        self._env = ShapeEnv()
        self._mode = FakeTensorMode(shape_env=self._env, allow_non_fake_inputs=True)
        self._storages: dict[int, torch.Tensor] = {}

    def number(self, expression: sympy.Expr, kind: str, hint: Any) -> Any:
        env = self._env
        for symbol in expression.free_symbols - env.var_to_range.keys():
            lowest = 1 if symbol.is_positive else 0 if symbol.is_nonnegative else -int_oo
            env.var_to_stack[symbol] = CapturedTraceback.extract()
            env._update_var_to_range(symbol, ValueRanges(lowest, int_oo))  # type: ignore[arg-type]
        if expression.is_Symbol and hint is not None:
            env.backed_var_to_val[expression] = sympy.Integer(hint)  # type: ignore[index]
        if kind == "SymFloat":
            return env.create_symfloatnode(expression, hint=hint)
        if kind == "SymBool":
            return env.create_symboolnode(expression)
        return env.create_symintnode(expression, hint=hint)

    def tensor(self, layout: Layout) -> Any:
        # Fake tensors are made of meta tensors here: by way of their mode it takes ten times as long.
        with torch.no_grad():
            return FakeTensor(self._mode, self._meta(layout), layout.device)

    def _meta(self, layout: Layout) -> torch.Tensor:
        base = self._storages.get(layout.storage)
        if base is None and layout.offset == 0:
            found = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
            self._storages[layout.storage] = found
            return found
        if base is None:
            base = torch.empty(layout.storage_bytes, dtype=torch.uint8, device="meta")
            self._storages[layout.storage] = base
        try:
            empty: Any = torch.empty(0, dtype=layout.dtype, device="meta")
            return empty.set_(base.untyped_storage(), layout.offset, layout.size, layout.stride)
        except Exception:  # sizes that depend on data: nobody can say that it fits
            return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
