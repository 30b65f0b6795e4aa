"""One call of a step, traced: what it returns, what it does to p.grad, and what a trace cannot be made of."""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..codegen.as_it_stands import DATA_DECIDES, MOVED, Traced, traced, user_place
from ..codegen.tracing_state import is_fake
from ..codegen.wrapped_tensors import Wrapping, flat, parts_of
from .arguments import arguments_of
from .found import PLAIN, Found
from .gradients import Before, Gradients, layout_of
from .side_effects import AliasedError, SideEffects

# Of errors where a trace has to know a number of a tensor: torch's, and Python's of f"{loss:.3f}".
_READS_NUMBERS = (
    "get value out of a tracing tensor",
    "numpy() is not supported",
    "FakeTensor.__format__",
    "SymFloat.__format__",
)


class NotTraceable(Exception):
    """What the step does that no program can do."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """The structure of what a step returns, and its leaves: how they are made where they are tensors."""

    structure: Any
    leaves: Sequence[Any]

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the step returns, made of these."""
        returned = iter(tensors)
        leaves = [leaf.around(returned) if isinstance(leaf, Wrapping) else leaf for leaf in self.leaves]
        return _filled(self.structure, leaves)


def _filled(structure: Any, leaves: list[Any]) -> Any:
    if structure.is_leaf():
        return leaves[0]
    if structure.type is tuple and len(leaves) == structure.num_children == structure.num_leaves:
        return tuple(leaves)
    return tree_unflatten(leaves, structure)


class TracedCall:
    """A call that is traced.

    Attributes:
        traced, outputs, gradients: what was found out.
        before: the gradients that the trace begins with.
        needs_absent: the trace has used a gradient that is not there.
        parts: of tensors in the arguments.
        updated: the parameters for which optimizers had a gradient.
        taken: which of them are inputs: one that is given twice, or that the step reaches otherwise, is one input.
    """

    traced: Traced
    outputs: Outputs
    gradients: Gradients

    def __init__(
        self, step: Callable[..., Any], found: Found, leaves: Sequence[Any], structure: Any, before: Before
    ) -> None:
        self._step, self._found, self._leaves, self._structure, self.before = step, found, leaves, structure, before
        self._places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.parts = flat(leaves[place] for place in self._places)
        self.taken: list[int] = []
        self.needs_absent = False
        self._stepped: dict[int, tuple[int, int]] = {}
        self.strangers: list[str] = []
        self.updated: dict[Optimizer, list[torch.Tensor]] = {}
        self.modes: list[tuple[dict[str, Any], bool]] = []
        self._thread = threading.get_ident()

    def trace(
        self, tensors: Sequence[torch.Tensor], effects: SideEffects, varying: Sequence[Collection[int]]
    ) -> None:
        """Trace the call.

        Args:
            tensors: what the step reaches, those that are made of others by their parts.
            effects: notes what changes in Python's objects.
            varying: for each argument that is a tensor, or a part of one, the dimensions whose sizes may vary.

        Raises:
            NotTraceable: it reads numbers from tensors, or uses tensors that are not known.
        """

        known = set(map(id, tensors))
        first = {id(part): place for place, part in reversed(list(enumerate(self.parts)))}
        self.taken = sorted(place for key, place in first.items() if key not in known)
        given, grads = [self.parts[place] for place in self.taken], flat(self.before.tensors())
        if not {id(part) for part in given}.isdisjoint(map(id, grads)):
            raise NotTraceable("it is given p.grad of one of its parameters: give it a copy")
        varying = [varying[place] for place in self.taken]
        handle = register_optimizer_step_post_hook(self._note_step)
        try:
            self.traced = traced(functools.partial(self._call, effects), [*tensors, *grads], given, varying)
        except DATA_DECIDES as error:
            raise NotTraceable(_decision(error)) from error
        except AliasedError:
            raise NotTraceable(
                "it gives one tensor two of the names that it had for two, which copies would not: write with copy_"
            ) from None
        except MOVED as error:
            raise NotTraceable(f"it sets .data of a tensor, or gives one another device: {error}") from error
        except (RuntimeError, TypeError) as error:
            if not any(text in str(error) for text in _READS_NUMBERS):
                raise
            raise NotTraceable(_decision(error)) from error
        finally:
            handle.remove()
        if faults := [*self.traced.faults, *self.strangers] or [_used(*one) for one in self.traced.unknown[:5]]:
            raise NotTraceable("\n    ".join(dict.fromkeys(faults)))

    def _call(
        self, effects: SideEffects, given: Sequence[torch.Tensor], is_used: Callable[[torch.Tensor], bool]
    ) -> list[torch.Tensor]:
        """The call as it is traced. Returns what the step returns, and gradients that it has made."""
        leaves = list(self._leaves)
        fakes = {id(self.parts[place]): fake for place, fake in zip(self.taken, given, strict=True)}
        parts = (fakes.get(id(part), part) for part in self.parts)
        for place in self._places:
            leaves[place] = Wrapping.of(self._leaves[place]).around(parts)
        args, kwargs = arguments_of(leaves, self._structure)
        result, structure = tree_flatten(self._step(*args, **kwargs))
        own = (place for place in self._places if leaves[place] is not self._leaves[place])
        asked = (place for place in own if self._leaves[place].requires_grad)
        if any(leaves[place].is_leaf and leaves[place].grad is not None for place in asked):
            raise NotTraceable(
                "it adds to the gradient of an argument, which a replay does not: give it a tensor without "
                "requires_grad, and call requires_grad_() and torch.autograd.grad in the step"
            )
        _check_results(result)
        self.outputs = Outputs(
            structure, [Wrapping.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in result]
        )
        with torch.no_grad():
            # A tensor that is found may get another content below.
            returned = [leaf if is_fake(leaf) else leaf.clone() for leaf in result if isinstance(leaf, torch.Tensor)]
            effects.write_back()
            self._look_at_gradients(is_used)
        returned += [grad for parameter in self.gradients.made if (grad := parameter.grad) is not None]
        return flat(tensor.detach() for tensor in returned)

    def _look_at_gradients(self, is_used: Callable[[torch.Tensor], bool]) -> None:
        """Note what the trace has done to p.grad."""
        there: list[tuple[torch.Tensor, object]] = []
        cleared, dropped, made = [], [], []
        for parameter, grad, is_there in self.before.entries():
            after, used = parameter.grad, grad is not None and any(map(is_used, parts_of(grad)))
            if grad is None and (parameter.requires_grad or after is not None):
                there.append((parameter, None))
            elif is_there and used:
                there.append((parameter, layout_of(grad)))
            elif grad is not None and not is_there:  # see ``Before.with_any``
                self.needs_absent |= used
            if after is grad:
                continue
            if after is None:
                cleared.append(parameter)
            elif grad is not None and is_there and used:
                grad.copy_(after)
                parameter.grad = None
                parameter.grad = grad
            elif grad is not None and self._stepped.get(id(parameter)) == (id(after), after._version):
                dropped.append(parameter)
            else:
                made.append(parameter)
        wrapped = [Wrapping.of(grad) for parameter in made if (grad := parameter.grad) is not None]
        self.gradients = Gradients(there, cleared, dropped, made, wrapped)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has used these gradients: what is left of them is of no use but to look at."""
        if threading.get_ident() == self._thread:
            if all(optimizer is not known for known in self._found.optimizers.values()):
                kind = type(optimizer).__name__
                self.strangers.append(
                    f"a {kind} that is found in no variable of the step: give train_step(step, optimizers=[...])"
                )
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                if (grad := parameter.grad) is not None:
                    self.updated.setdefault(optimizer, []).append(parameter)
                    self._stepped[id(parameter)] = id(grad), grad._version


def _check_results(result: Sequence[Any]) -> None:
    if any(is_fake(leaf) and not isinstance(leaf, torch.Tensor) for leaf in result):
        raise NotTraceable("it returns a number that is read from a tensor: return the tensor")
    for leaf in result:
        if not isinstance(leaf, (*PLAIN, torch.Tensor)):
            raise NotTraceable(
                f"it returns an object of type {type(leaf).__name__}: return tensors, numbers and texts, in tuples, "
                "lists and dictionaries"
            )


def _used(unknown: torch.Tensor, line: str) -> str:
    dtype, shape = str(unknown.dtype).removeprefix("torch."), list(unknown.shape)
    return (
        "a tensor that is found in no module, optimizer, variable or argument of the step, or in tuples, lists and "
        f"dictionaries of these: {dtype}{shape}, used at {line}"
    )


def _decision(error: BaseException) -> str:
    """What to do where a step decides on data, with its line."""
    place = user_place(reversed(list(traceback.walk_tb(error.__traceback__))))
    where = f" at {place.rstrip(':')}" if place else ""
    return (
        f"it reads a number from a tensor{where}: compute with the tensor (torch.where); to skip an update, call "
        "fxwrap.step_if(condition, optimizer); read numbers outside of the step"
    )
