"""Random numbers of a trace, and positions among them: what sets a generator's state back draws the same again.

::

    checkpoint(f, x)     state = get_rng_state()      position 3
                         f: dropout                   draws number 3
    backward             set_rng_state(state)         position 3
                         f again: dropout             is number 3, and draws nothing

A trace draws nothing from torch's generators, so that their states would all be one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ....codegen.devices.patches import Patches


class RandomNumbers:
    """The random numbers that a trace has drawn, in order."""

    def __init__(self) -> None:
        self._drawn: list[tuple[Any, torch.Tensor]] = []
        self._position = 0
        self._states: list[tuple[torch.Tensor, int]] = []
        self.faults: list[str] = []

    def draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a random operator returns: the numbers at this position, if it has drawn them before."""
        written = args[0] if func._schema.is_mutable else None
        asked = func, tuple(_described(value) for value in (*args, *kwargs.values()))
        if self._position < len(self._drawn):
            if self._drawn[self._position][0] != asked:
                self.faults.append("it sets a generator's state back, and then draws other numbers than before")
            numbers = self._drawn[self._position][1]
            result = tree_map_only(torch.Tensor, torch.clone, numbers) if written is None else written.copy_(numbers)
        else:
            result = func(*args, **kwargs)
            # The step may write to what it has drawn.
            self._drawn.append((asked, tree_map_only(torch.Tensor, torch.clone, result)))
        self._position += 1
        return result

    def forget(self) -> None:
        """Drop what was drawn: the trace has ended."""
        self._drawn.clear()
        self._states.clear()

    def patch(self, patches: Patches, here: Callable[[], bool]) -> None:
        """Have torch's functions for the states of generators mean positions.

        Args:
            here: whether a call belongs to the trace; other threads have the functions as they are.
        """
        self._here = here
        device = torch._C._get_accelerator().type
        owners = [torch, torch.random]
        if (module := getattr(torch, device, None)) is not None and device != "cpu":
            owners += [module, getattr(module, "random", module)]
        for owner in owners:
            for name, function in (("get_rng_state", self._get), ("set_rng_state", self._set)):
                if hasattr(owner, name):
                    patches.put(owner, name, function(getattr(owner, name)))
            for name in ("manual_seed", "seed"):
                if hasattr(owner, name):
                    patches.put(owner, name, self._seeds(getattr(owner, name)))

    def _seeds(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def seed(*args: Any, **kwargs: Any) -> Any:
            if not self._here():
                return original(*args, **kwargs)
            self.faults.append("it sets a seed, which a replay does not: do so before the step")
            return None

        return seed

    def _get(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def get_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
            state = original(*args, **kwargs)
            if self._here():
                self._states.append((state, self._position))
            return state

        return get_rng_state

    def _set(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            known = [position for state, position in list(self._states) if state is new_state]
            if not self._here():
                original(new_state, *args, **kwargs)
            elif not known:
                self.faults.append("it sets a generator's state, which a replay does not: do so before the step")
            else:
                self._position = known[-1]

        return set_rng_state


def _described(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(map(str, value.shape))
    return repr(value)
