"""What ``fxwrap.load`` and ``fxwrap.aot_compile`` return: methods that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import sympy
import torch

from ...errors import InputError, StorageError
from ...graphs.compilation import Compilation
from ...graphs.program import Program
from ...graphs.replay.overlaps import MutatedInputs, RememberedCalls
from ...host_graph.nodes import output_values
from ...host_graph.tensors import unexpanded
from ...options import Options
from ...plan import ProgramPlan
from ...torch_private.functions import autocast_enabled, without_autocast
from ..caller_outputs.variant import Variants, check_given
from .signature import Checker, Look, NumberInput, Signature, TensorInput
from .structure import LEAF, flatten, unflatten, with_classes
from .tensors.memory import same_memory
from .tensors.names import FrozenWeights, names_of_weights

if TYPE_CHECKING:
    from ...inspection.explanation import Explanation
    from .codegen.export import CompiledMethod


class TensorsByName(Protocol):
    def __getitem__(self, name: str, /) -> torch.Tensor: ...


class _OfThisProcess:
    """Base of objects that cannot be copied: their kernels and recordings exist in this process alone."""

    def __reduce__(self) -> NoReturn:
        raise StorageError(
            "a compiled program cannot be copied or pickled",
            expected="a file of it, which any process can load",
            remedy="load the file again (fxwrap.load), or make one of the program (fxwrap.save)",
        )


class AotMethod(_OfThisProcess):
    """A method that is compiled ahead of time: ``method(*args, **kwargs)``. It computes no gradients.

    Attributes:
        signature: what the method takes; print it.
        weights: parameters and buffers by their names in the method's module.
        frozen: names of the other weights, whose values are compiled in.
    """

    def __init__(
        self,
        signature: Signature,
        program: Program,
        weights: Mapping[str, torch.Tensor],
        frozen: Iterable[str],
    ) -> None:
        self.signature, self.program, self.weights, self.frozen = signature, program, dict(weights), tuple(frozen)
        self._weights = list(self.weights.values())
        self._check = Checker(signature)
        passed = [place for place, expected in enumerate(signature.inputs) if not _compiled_in(expected)]
        self._passed = passed if len(passed) < len(signature.inputs) else None
        mutated = MutatedInputs.of(program.plan)
        mutated = mutated.with_static(self._weights, range(len(self._weights))) if mutated else None
        self._mutated = RememberedCalls(mutated) if mutated else None
        args, kwargs = signature.arguments["tuple"]
        # Number of arguments if all are positional and none is nested: then they need no flattening; else -1.
        self._plain = len(args["tuple"]) if all(a == LEAF for a in args["tuple"]) and not kwargs["dict"] else -1
        self._single = signature.results == LEAF
        self._outputs = Variants(program, f"out of {signature.method}", range(len(self._weights)))
        self._results = with_classes(signature.results)
        self._constant = _constant_results(program.plan)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = len(args) == self._plain and not kwargs
        return self.call_flat(list(args) if plain else self.signature.flat(args, kwargs))

    def run(self, *args: Any, out: Any, **kwargs: Any) -> Any:
        """Call the method, and write results to tensors of the caller.

        ::

            y = torch.empty(4, 8)
            program.decode.run(x, out=y)  # returns y

        The last kernel or library call that computes a result writes to the tensor directly. A result is copied if it
        is an operator's own new tensor, an input, or shares memory with another result; and on accelerators, where
        recordings keep the addresses they were made with, if ``out`` is not the tensor of earlier calls.

        Args:
            out: a tensor with the size, the strides, the dtype and the device of the result; for several results
                the structure that the method returns, with such a tensor, or None for a new one, in each place.

        Returns:
            What a call returns, with the given tensors in it.

        Raises:
            InputError: an input or a tensor of ``out`` does not fit, or such a tensor shares memory with another or
                with an input; then nothing has run.
        """
        plain = len(args) == self._plain and not kwargs
        inputs = list(args) if plain else self.signature.flat(args, kwargs)
        given = [out] if self._single else list(flatten(self.signature.results, out, " out"))
        check_given(given, f"out of {self.signature.method}")
        wanted = {position: tensor for position, tensor in enumerate(given) if tensor is not None}
        if not wanted:
            return self.call_flat(inputs)
        values, _ = self._values(inputs)
        if wanted.keys() - self._outputs.layouts(values).keys():
            raise self._outputs.refused(
                "None for a result that is no tensor, or whose size is not known before the call", "a tensor"
            )
        results = self._run(lambda values: self._outputs.run(values, wanted), values)
        results = _with_copies(results, [place for place in self._constant if place not in wanted])
        return results[0] if self._single else unflatten(self._results, iter(results))

    def call_flat(self, inputs: list[Any]) -> Any:
        """Call the method with its inputs as a flat list, in the order of the signature."""
        values, look = self._values(inputs)
        if self._mutated is not None:
            self._check_apart(self._mutated, values, look)
        results = self._run(self.program.run, values)
        if self._constant:
            results = _with_copies(results, self._constant)
        if self._single:
            return results
        return unflatten(self._results, iter(results if isinstance(results, (list, tuple)) else [results]))

    def _values(self, inputs: list[Any]) -> tuple[list[Any], Look | None]:
        """The program's inputs, which are checked; and how: None if in full, of which nothing is remembered."""
        look = self._check.look
        if look is None or not look(inputs):
            look = None
            self._check(inputs)
        if self._passed is not None:
            inputs = [inputs[place] for place in self._passed]
        return self._weights + inputs, look

    @staticmethod
    def _run(run: Callable[[list[Any]], Any], values: list[Any]) -> Any:
        if not autocast_enabled():
            return run(values)
        # Under autocast, operators would take and return other dtypes than those that memory is planned for.
        with without_autocast():
            return run(values)

    def fxwrap_programs(self) -> tuple[list[Program], str]:
        """See ``graphs.compilation.HasPrograms``."""
        return [self.program], self.signature.method

    def report_to(self, compilation: Compilation) -> None:
        """Have reports find the programs that ``run`` makes."""
        self._outputs.compilation = compilation

    def _check_apart(self, mutated: RememberedCalls, values: list[Any], look: Look | None) -> None:
        """Check that a tensor that is written shares no memory with another input, as AOTAutograd assumes.

        Raises:
            InputError: one does.
        """
        if mutated.are_apart(values, look):
            return
        facts, nodes = self.program.plan.facts, self.program.plan.placeholders
        inputs = [expected.name for expected in self.signature.inputs if not _compiled_in(expected)]
        names = [*self.weights, *inputs]
        written = facts.all_written()
        of_written = [name for name, node in zip(names, nodes, strict=True) if facts.of(node) & written]
        raise InputError(
            f"call of {self.signature.method}, which writes to {', '.join(of_written)}",
            expected="other inputs with other memory",
            got="an input that shares memory with one that is written",
            remedy="pass a clone of one of them",
        )


def _compiled_in(expected: TensorInput | NumberInput) -> bool:
    return isinstance(expected, NumberInput) and not isinstance(expected.value, sympy.Basic)


def _constant_results(plan: ProgramPlan) -> list[int]:
    """Positions of results that freezing has computed: they lie in the memory of constants."""
    gm, facts = plan.graph, plan.facts
    held = [n for n in gm.graph.find_nodes(op="get_attr") if isinstance(getattr(gm, str(n.target)), torch.Tensor)]
    constants, results = facts.behind(held), output_values(gm)
    return [n for n, value in enumerate(results) if isinstance(value, torch.fx.Node) and facts.of(value) & constants]


def _with_copies(results: Any, places: Sequence[int]) -> Any:
    """Copy results that lie in constants: otherwise the next call would return what the caller writes to them."""
    if not isinstance(results, (list, tuple)):
        return results.clone()
    copied = list(results)
    for place in places:
        copied[place] = copied[place].clone()
    return copied


@dataclass(frozen=True)
class CompiledMethods:
    """Methods that are compiled, by name, and the options that their programs run with."""

    methods: Mapping[str, CompiledMethod]
    options: Options


class AotProgram(_OfThisProcess):
    """Methods that are compiled ahead of time: ``program["decode"](x)``, or ``program.decode(x)``.

    Args:
        tensors: the tensors of the methods, by the name of their entry.
        entries: the entries of tensors, as in a manifest.
        compiled: what ``fxwrap.save`` needs; None for a program that was loaded from a file.

    Attributes:
        methods: the signatures of the methods, by name.
    """

    def __init__(
        self,
        methods: Mapping[str, AotMethod],
        tensors: TensorsByName,
        entries: Mapping[str, Any],
        compiled: CompiledMethods | None = None,
    ) -> None:
        self._methods, self._compiled, self._names = dict(methods), compiled, names_of_weights(entries)
        self._weights = {name: tensors[name] for name in dict.fromkeys(self._names.values())}
        self._compilation = Compilation([method.program for method in methods.values()])  # reports find it
        for method in methods.values():
            method.report_to(self._compilation)
        self._frozen = FrozenWeights.of({name: method.frozen for name, method in methods.items()}, entries)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of all methods, each once.

        The key is the name in the method's module, or ``method.name`` if a different weight has that name.
        """
        return dict(self._weights)

    @property
    def methods(self) -> Mapping[str, Signature]:
        return {name: method.signature for name, method in self._methods.items()}

    def __getitem__(self, name: str) -> AotMethod:
        try:
            return self._methods[name]
        except KeyError:
            raise InputError("no such method", expected=", ".join(self._methods), got=repr(name)) from None

    def __getattr__(self, name: str) -> AotMethod:
        methods = self.__dict__.get("_methods", {})
        if name in methods:
            return methods[name]  # type: ignore[no-any-return]
        raise AttributeError(f"the program has no method {name!r}: it has {', '.join(methods)}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._methods)

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Copy new values to weights. Recordings stay valid.

        The weights of ``fxwrap.aot_compile`` are those of the module, which gets the values as well.

        Args:
            weights: new values by name; a tied weight has several names, and any of them will do.

        Raises:
            StorageError: a name is unknown, a shape differs, real weights get complex values, or one weight gets two
                values; then nothing was copied.
        """
        if not isinstance(weights, Mapping):
            raise StorageError("new weights", expected="a dictionary of names and tensors", got=repr(weights))
        values: dict[str, torch.Tensor] = {}
        for name, value in weights.items():
            self._frozen.check(name, self._names.get(name))
            if name not in self._names:
                raise StorageError(
                    f"weight {name!r}", expected=f"one of {', '.join(self._weights)}", got="a name that no weight has"
                )
            if not isinstance(value, torch.Tensor):
                raise StorageError(f"weight {name!r}", expected="a tensor", got=type(value).__name__)
            weight = self._weights[self._names[name]]
            sizes = str(tuple(weight.size())), str(tuple(value.size()))
            if sizes[0] != sizes[1]:
                raise StorageError(f"weight {name!r}", expected=sizes[0], got=sizes[1])
            if value.is_complex() and not weight.is_complex():
                raise StorageError(f"weight {name!r}", expected=f"real numbers, {weight.dtype}", got=str(value.dtype))
            once = unexpanded(value, weight.stride())
            if once.size() != value.size() and not torch.equal(once.expand_as(value), value):
                raise StorageError(
                    f"weight {name!r}", expected=f"values that repeat: strides are {weight.stride()}", got="others"
                )
            if not same_memory(values.setdefault(self._names[name], value), value):
                raise StorageError(
                    f"weight {self._names[name]!r}", expected="one tensor", got=f"another one as {name!r}"
                )
        with torch.no_grad():
            for name, value in values.items():
                weight = self._weights[name]
                unexpanded(weight).copy_(unexpanded(value, weight.stride()))

    def fxwrap_programs(self) -> tuple[list[Program], str]:
        """See ``graphs.compilation.HasPrograms``."""
        return list(self._compilation.programs), ", ".join(self._methods)

    def explain(self) -> Explanation:
        """The decisions about all methods, as ``fxwrap.explain`` shows them."""
        from ...api.report import report

        return report(self)


def compiled_methods_of(program: AotProgram) -> CompiledMethods:
    """What a program consists of, for ``fxwrap.save``.

    Raises:
        StorageError: the program was loaded from a file, which has its kernels in another form.
    """
    if program._compiled is None:
        raise StorageError(
            "a program that was loaded from a file is not saved again",
            expected="methods, or what fxwrap.aot_compile returned",
            remedy="copy the file; for other weights, save the methods again, or give weights to fxwrap.load",
        )
    return program._compiled
