"""The budget of a program: the most bytes that a call may take, what is known of them, and the one loop that plans.

What fits is found out here for calls, for ``MemoryLimitError.least`` and for the picture of limits: one figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...errors import MemoryLimitError, PlanError
from ...host_graph.sizes import evaluate_sizes, hint, hinted_layout, storage_bytes, symbols_at
from ...limit import Limit, does_not_fit
from ...plan import ProgramPlan, SizedProgram
from ..devices.runtime import freezes_addresses, runtime_for
from .operator_memory import known_memory
from .planning import Planner

# Each further attempt lowers the budget for storages by at least 1/64 of the limit.
_STEPS = 64
# Partitions a program, within a limit or without one.
PartitionWithin = Callable[[Limit | None], ProgramPlan]


def nearest(partition: PartitionWithin, limit: Limit | None) -> ProgramPlan:
    """The plan within a limit; if no plan keeps it, the one with the lowest peak.

    A limit is checked again for each set of sizes: smaller calls may fit, and others raise then.
    """
    try:
        return partition(limit)
    except MemoryLimitError as error:
        if limit is None or not error.least:
            raise
        return partition(replace(limit, nbytes=error.least))


@dataclass(frozen=True)
class PlannedCall:
    """What memory is planned for: a call's inputs, of any plan of the program.

    Attributes:
        inputs: tensors and numbers, by position. Only sizes and numbers are read.
        input_buffers, frozen, donated: see ``SizedProgram``.
        saved: what a backward's forward has saved: the bytes of each storage, and the inputs that share it.
    """

    inputs: tuple[Any, ...]
    input_buffers: Mapping[str, tuple[torch.device, int]]
    frozen: bool
    donated: tuple[tuple[int, tuple[str, ...]], ...] = ()
    saved: tuple[tuple[int, tuple[str, ...]], ...] = ()

    @classmethod
    def compiled_for(cls, plan: ProgramPlan, saved: Sequence[tuple[int, tuple[str, ...]]] = ()) -> PlannedCall:
        """A call with the sizes that a program was compiled for, whose inputs move if they may."""
        inputs, buffers, frozen = list[Any](), dict[str, tuple[torch.device, int]](), freezes_addresses(plan.device)
        stay = {name for _, names in saved for name in names}
        for position, node in enumerate(plan.placeholders):
            value: Any = node.meta.get("val")
            layout = hinted_layout(value)
            if layout is None:
                inputs.append(hint(value) if isinstance(value, (int, torch.SymInt)) else None)
                continue
            inputs.append(torch.empty_strided(*layout, dtype=value.dtype, device="meta"))
            if frozen and position not in plan.inputs.static and node.name not in stay:
                buffers[node.name] = value.device, storage_bytes(*layout, value.dtype)
        return cls(tuple(inputs), buffers, frozen, saved=tuple(saved))


@dataclass(eq=False)
class Budget:
    """The bytes that a program's calls may take beside its inputs, and what was learned of those that they take.

    Attributes:
        nbytes: the most; 0 is no limit.
        in_pool: the most bytes by which a recording has enlarged its graphs' pool; None before the first.
    """

    planner: Planner
    nbytes: int = 0
    in_pool: int | None = None
    _seen: dict[frozenset[Any], Mapping[str, int]] = field(default_factory=dict)  # workspace by node, by sizes

    def sized(self, plan: ProgramPlan, call: PlannedCall) -> SizedProgram:
        """A plan at the sizes of a call, with the workspace of library calls there."""
        numbers = evaluate_sizes(plan.graph, dict(zip(plan.placeholders, call.inputs, strict=True)))
        symbols = symbols_at(numbers)
        workspace = dict(self.planner.workspace(plan.graph, symbols)) if self.nbytes and symbols else {}
        workspace.update(seen := self._seen.get(_key(symbols), {}))
        workspace.update({one.node: seen[one.repeats] for one in plan.repeated if one.repeats in seen})
        operators = known_memory(plan, symbols) if call.frozen else {}
        return SizedProgram(plan, numbers, call.input_buffers, call.frozen, call.donated, workspace, operators)

    def note_workspace(self, sized: SizedProgram, workspace: Mapping[str, int]) -> None:
        """Remember what calls have allocated in a warm-up, by node."""
        key = _key(symbols_at(sized.symbol_values))
        self._seen[key] = {**self._seen.get(key, {}), **workspace}

    def taken(self, plan: ProgramPlan, call: PlannedCall) -> int:
        """The most bytes that a call takes beside its inputs; what its forward has saved counts until its last use.

        Raises:
            MemoryLimitError: that cannot be known.
        """
        sized, kept = self.sized(plan, call), 0
        if call.saved and not call.frozen:
            sized = replace(sized, donated=call.saved)
        elif call.saved:
            freed = _freed(plan, call)
            kept = sum(nbytes for nbytes, _ in call.saved) - sum(nbytes for _, nbytes in freed.values())
            sized = replace(sized, input_buffers={**freed, **sized.input_buffers})
        try:
            return kept + self.planner.bytes_of_call(sized, self.in_pool or 0)
        except PlanError as error:
            raise MemoryLimitError(
                "memory_limit cannot be held: what a program takes is not known",
                expected=error.expected,
                got=error.subject,
                remedy=f"{error.remedy}, or leave memory_limit out for this function",
            ) from error

    def within(
        self, nbytes: int, call: PlannedCall, plan: ProgramPlan, limit: Limit | None, partition: PartitionWithin
    ) -> tuple[ProgramPlan, Limit | None]:
        """A plan with which a call takes no more than so many bytes, and its limit; both unchanged if ``plan`` does.

        Partitioning counts storages only. What an arena takes on top (gaps, static buffers) is known once it is
        planned, and is subtracted from the limit for the next attempt. If nothing fits, the plan with
        the lowest peak is taken, and what a call takes with it is the least limit that the error names.

        Raises:
            MemoryLimitError: there is none.
        """
        while (more := self.taken(plan, call) - nbytes) > 0:
            symbols = symbols_at(self.sized(plan, call).symbol_values)
            given = {name: saved for name, (_, saved) in _freed(plan, call).items()}
            fresh = Limit(nbytes, 0, symbols, self._seen.get(_key(symbols), {}), given)
            tried = limit is not None and replace(limit, overhead=0) == fresh
            overhead = limit.overhead + max(more, nbytes // _STEPS) if limit is not None and tried else 0
            limit = replace(fresh, overhead=overhead)
            try:
                plan = partition(limit)
            except MemoryLimitError as error:
                if not error.least:
                    raise
                plan = partition(replace(limit, nbytes=error.least))
                if (least := self.taken(plan, call)) > nbytes:
                    raise self.does_not_fit(nbytes, least, plan) from None
                break
        return plan, limit

    def least(self, call: PlannedCall, plan: ProgramPlan, partition: PartitionWithin) -> int:
        """The lowest limit that fits."""
        try:
            plan, _ = self.within(1, call, plan, None, partition)
            return self.taken(plan, call)
        except MemoryLimitError as error:
            if not error.least:
                raise
            return error.least

    def does_not_fit(self, nbytes: int, least: int, plan: ProgramPlan) -> MemoryLimitError:
        """The error of a call that takes more than a limit of so many bytes."""
        runtime = runtime_for(plan.device)
        known = self.in_pool is not None or not runtime.frozen_addresses or runtime.placements is not None
        return does_not_fit(nbytes, least, "" if known else ", and what libraries take in a capture")


def _freed(plan: ProgramPlan, call: PlannedCall) -> dict[str, tuple[torch.device, int]]:
    """What is freed after its last use, of what the forward has saved: device and bytes of each storage, by that of
    its inputs that is used last. In an arena, bytes are used again where AOTAutograd donates all of these inputs."""
    donated = {plan.placeholders[position].name for position in plan.inputs.donated}

    def last_use(name: str) -> int:
        return max((plan.lifetimes.get(i, range(0)).stop for i in plan.facts.behind_named([name])), default=0)

    freed = (one for one in call.saved if not call.frozen or donated.issuperset(one[1]))
    return {max(names, key=last_use): (plan.device, nbytes) for nbytes, names in freed}


def _key(symbols: Mapping[Any, int]) -> frozenset[Any]:
    return frozenset(symbols.items())
