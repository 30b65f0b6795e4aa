"""What ``fxwrap.load`` returns: the methods of a saved program, which run in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import sympy
import torch

from ..codegen.torch_runtime import autocast_enabled, torch_functions, without_autocast
from ..errors import InputError, StorageError
from ..graphs.program import Program
from ..graphs.replay.overlaps import MutatedInputs
from ..host_graph.nodes import output_values
from ..plan import ProgramPlan
from .signature import Checker, Look, NumberInput, Signature, TensorInput
from .stored_tensors import FrozenWeights
from .structure import LEAF, flatten, unflatten, with_classes
from .tensors import same_memory, without_repeats

if TYPE_CHECKING:
    from ..api.report import Explanation


class _Loaded:
    """What a file was loaded as: kernels and recordings, which exist in this process alone."""

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            "a loaded program cannot be copied or pickled",
            expected="the file itself, which any process can load",
            remedy="load the file again: fxwrap.load(path, trust=True)",
        )


class LoadedMethod(_Loaded):
    """One method of a saved program: ``method(*args, **kwargs)``. No gradients are computed.

    Attributes:
        signature: what it takes; print it.
        weights: parameters and buffers by the names that they have in its module.
    """

    def __init__(self, signature: Signature, program: Program, weights: Mapping[str, torch.Tensor]) -> None:
        self.signature, self.program, self.weights = signature, program, dict(weights)
        self._weights = list(self.weights.values())
        functions = torch_functions()
        self._check = Checker(signature, functions.layout_check)
        passed = [place for place, one in enumerate(signature.inputs) if not _compiled_in(one)]
        self._passed = passed if len(passed) < len(signature.inputs) else None
        mutated = MutatedInputs.of(program.plan, functions.overlap)
        self._mutated = mutated.with_static(self._weights, range(len(self._weights))) if mutated else None
        self._apart = set[tuple[Any, ...]]()  # layouts and addresses of inputs that were found apart
        args, kwargs = signature.arguments["tuple"]
        # Plain positional tensors are a list already.
        self._plain = len(args["tuple"]) if all(a == LEAF for a in args["tuple"]) and not kwargs["dict"] else -1
        self._single = signature.results == LEAF
        self._results = with_classes(signature.results)
        self._constant = _constant_results(program.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == self._plain and not kwargs:
            inputs = list(args)
        else:
            inputs = list(flatten(self.signature.arguments, (args, kwargs)))
        return self.call_flat(inputs)

    def call_flat(self, inputs: list[Any]) -> Any:
        """Call it with its inputs in the order of the signature."""
        look = self._check(inputs)
        if self._passed is not None:
            inputs = [inputs[place] for place in self._passed]
        values = self._weights + inputs
        if self._mutated is not None:
            self._check_apart(self._mutated, values, look)
        if autocast_enabled():
            # Operators would take and return other dtypes than those that memory is planned for.
            with without_autocast():
                found = self.program.run(values)
        else:
            found = self.program.run(values)
        if self._constant:
            found = _with_copies(found, self._constant)
        if self._single:
            return found
        return unflatten(self._results, iter(found if isinstance(found, (list, tuple)) else [found]))

    def _check_apart(self, mutated: MutatedInputs, values: list[Any], look: Look | None) -> None:
        """Raise where a tensor that is written shares memory with an input: AOTAutograd has taken for granted that
        none does."""
        where = (look, *[values[place].data_ptr() for place, _ in mutated.moving])
        if look is not None and where in self._apart:
            return
        if mutated.are_apart(values):
            if len(self._apart) >= _PLACES:
                self._apart.clear()
            if look is not None:
                self._apart.add(where)
            return
        facts, nodes = self.program.plan.facts, self.program.plan.placeholders
        names = [*self.weights, *(one.name for one in self.signature.inputs if not _compiled_in(one))]
        written = facts.all_written()
        of_written = [name for name, node in zip(names, nodes, strict=True) if facts.of(node) & written]
        raise InputError(
            f"call of {self.signature.method}, which writes to {', '.join(of_written)}",
            expected="other inputs with other memory",
            got="an input that shares memory with one that is written",
            remedy="pass a clone of one of them",
        )


# Allocators give the same few addresses again and again.
_PLACES = 64


def _compiled_in(known: TensorInput | NumberInput) -> bool:
    return isinstance(known, NumberInput) and not isinstance(known.value, sympy.Basic)


def _constant_results(plan: ProgramPlan) -> list[int]:
    """Results that lie in the memory of constants, by position: freezing has computed them."""
    gm, facts = plan.graph, plan.facts
    held = [n for n in gm.graph.find_nodes(op="get_attr") if isinstance(getattr(gm, str(n.target)), torch.Tensor)]
    constants, results = facts.behind(held), output_values(gm)
    return [n for n, value in enumerate(results) if isinstance(value, torch.fx.Node) and facts.of(value) & constants]


def _with_copies(results: Any, places: Sequence[int]) -> Any:
    """Results that the caller may write to: the next call would return what was written."""
    if not isinstance(results, (list, tuple)):
        return results.clone()
    copied = list(results)
    for place in places:
        copied[place] = copied[place].clone()
    return copied


class LoadedProgram(_Loaded):
    """The methods of a saved program: ``program["decode"](x)``, or ``program.decode(x)``.

    Attributes:
        methods: their signatures by name.
    """

    def __init__(
        self,
        methods: Mapping[str, LoadedMethod],
        weights: Mapping[str, torch.Tensor],
        names: Mapping[str, str],
        frozen: FrozenWeights,
    ) -> None:
        self._methods, self._weights, self._names = dict(methods), dict(weights), dict(names)
        self._frozen = frozen

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all methods, each once: by the name that it has in its module, or ``method.name``
        where another weight of an earlier method has that."""
        return dict(self._weights)

    @property
    def methods(self) -> Mapping[str, Signature]:
        return {name: method.signature for name, method in self._methods.items()}

    def __getitem__(self, name: str) -> LoadedMethod:
        try:
            return self._methods[name]
        except KeyError:
            raise InputError("no such method", expected=", ".join(self._methods), got=repr(name)) from None

    def __getattr__(self, name: str) -> LoadedMethod:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]  # type: ignore[no-any-return]
        raise AttributeError(f"a saved program has no method {name!r}: it has {', '.join(methods)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy other values to weights. What was recorded goes on to be replayed.

        Args:
            weights: by their names, or by any other that a module has for them (tied weights have several).

        Raises:
            StorageError: a name is unknown, a shape is another one, or one weight gets two values; then nothing was
                copied.
        """
        values: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            self._frozen.check(name, self._names.get(name))
            if name not in self._names:
                raise StorageError(
                    f"weight {name!r}", expected=f"one of {', '.join(self._weights)}", got="a name of none"
                )
            if not isinstance(value, torch.Tensor):
                raise StorageError(f"weight {name!r}", expected="a tensor", got=type(value).__name__)
            own = self._weights[self._names[name]]
            sizes = str(tuple(own.size())), str(tuple(value.size()))
            if sizes[0] != sizes[1]:
                raise StorageError(f"weight {name!r}", expected=sizes[0], got=sizes[1])
            once = without_repeats(value, own.stride())
            if once.size() != value.size() and not torch.equal(once.expand_as(value), value):
                raise StorageError(
                    f"weight {name!r}", expected=f"values that repeat: strides are {own.stride()}", got="others"
                )
            if not same_memory(values.setdefault(self._names[name], value), value):
                raise StorageError(
                    f"weight {self._names[name]!r}", expected="one tensor", got=f"another one as {name!r}"
                )
        with torch.no_grad():
            for name, value in values.items():
                own = self._weights[name]
                without_repeats(own).copy_(without_repeats(value, own.stride()))

    def explain(self) -> Explanation:
        """What is decided about all methods, as ``fxwrap.explain`` shows it."""
        from ..api.report import Explanation

        return Explanation([method.program for method in self._methods.values()])
