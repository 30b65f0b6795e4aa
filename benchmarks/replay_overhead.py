"""What a call costs around the replay of a device graph, part by part, on the simulated accelerator.

    python benchmarks/replay_overhead.py            # needs examples/hostsim, which it builds

A program with static inputs (parameters), inputs that move, and outputs, is called as Inductor's runtime calls it;
beside it the graph alone is replayed, and the parts are called alone, from Python: filling static buffers, laying out
outputs. Microseconds are medians of turns. What ranges in profiles cost while no profiler is on is measured with a
program on the CPU that does next to nothing: the least that a call takes with them, less the least without.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples" / "hostsim"))


class Weighted(nn.Module):
    """Adds up parameters; every input goes into every output."""

    def __init__(self, static: int, outputs: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(8) for _ in range(static))
        self.outputs = outputs

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        total = sum(self.weights)
        for x in inputs:
            total = total * x  # type: ignore[assignment]
        return tuple(total + number for number in range(self.outputs))  # type: ignore[operator]


def microseconds(functions: dict[str, Callable[[], Any]], turns: int, calls: int) -> dict[str, float]:
    """The median of each, timed in turn."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(turns):
        for name, function in functions.items():
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times[name].append((time.perf_counter() - begin) / calls * 1e6)
    return {name: statistics.median(several) for name, several in times.items()}


def measure(static: int, copied: int, outputs: int, args: argparse.Namespace) -> dict[str, float]:
    import fxwrap
    from fxwrap.graphs.compilation import live_compilations
    from fxwrap.graphs.replay.ranges import copies_of_inputs

    torch._dynamo.reset()
    device = torch.device("hostsim", 0)
    model = Weighted(static, outputs).to(device).eval()
    compiled = torch.compile(model, backend="fxwrap", options={"capture": "always"})
    batches = [tuple(torch.randn(8).to(device) for _ in range(copied)) for _ in range(4)]
    caught: list[list[Any]] = []
    with torch.no_grad():
        for batch in batches * 3:
            for a, b in zip(compiled(*batch), model(*batch), strict=True):
                torch.testing.assert_close(a.cpu(), b.cpu())
            a = b = None
        programs = [program for compilation in live_compilations() for program in compilation.programs]
        program = [one for one in programs if len(one.plan.placeholders) == static + copied][-1]
        run, program.run = program.run, lambda inputs: (caught.append(list(inputs)), run(inputs))[1]
        for batch in batches:
            compiled(*batch)
        del program.run
        recording = program.specializations.recordings()[0]
        assert len(recording.request.static_inputs) == static, recording.request.static_inputs
        (graph,) = recording.graphs
        inputs, replay = caught[-1], recording._replay
        (fill,) = (part for part in replay.parts if part.name == copies_of_inputs(program.name))
        filled = [*inputs, *replay.registers[len(inputs) :]]
        before = program.counters.replays
        times = microseconds(
            {
                "program": lambda: program.run(list(inputs)),
                "list": lambda: list(inputs),
                "replay": graph.replay,
                "fill": lambda: fill.run(filled),
                "collect": lambda: replay.parts[-1].run(replay.registers),
            },
            args.turns,
            args.calls,
        )
        assert program.counters.replays == before + args.turns * args.calls
        assert fxwrap.stats()["fallbacks"] == {}
    times["around"] = times["program"] - times["list"] - times["replay"]
    times["native"] = float(recording.unit is not None)
    return times


class _WithoutNames:
    """The library, whose units have no ranges."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def unit(self, described: Any) -> Any:
        return self._library.unit(dataclasses.replace(described, name="", ranges=[]))


def ranges(turns: int, calls: int) -> dict[str, float]:
    """What ranges cost a call while no profiler is on, in microseconds, natively and in Python."""
    from fxwrap.graphs.compilation import live_compilations
    from fxwrap.torch_private import native_library
    from fxwrap.torch_private.functions import profiling

    torch._dynamo.reset()
    compiled, x = torch.compile(lambda x: x + 1, backend="fxwrap", options={"capture": "always"}), torch.randn(8)
    for _ in range(5):
        compiled(x)
    program = next(p for c in live_compilations() for p in c.programs if p.plan.device.type == "cpu")
    (recording,) = program.specializations.recordings()
    native = native_library.native_replay()
    assert not isinstance(native, str), native
    unit = recording.unit
    bare = dataclasses.replace(native, library=_WithoutNames(native.library))
    with mock.patch.object(native_library, "native_replay", lambda: bare):
        recording.make_unit()
    without, program.specializations.units = recording.unit, ()
    assert without is not unit and unit is not None

    times = dict.fromkeys(("with", "without", "asked", "not asked"), float("inf"))
    called: dict[str, Callable[[], Any]] = {
        "with": lambda: unit([x]),
        "without": lambda: without([x]),
        "asked": lambda: (profiling(), profiling()),
        "not asked": lambda: None,
    }
    for _ in range(turns):
        for name, time_of_one in microseconds(called, 1, calls).items():
            times[name] = min(times[name], time_of_one)
    return {"natively": times["with"] - times["without"], "in Python": times["asked"] - times["not asked"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--calls", type=int, default=500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    from hostsim.inductor import register

    register()
    free = ranges(10 * args.turns, args.calls)
    few, many = measure(25, 5, 3, args), measure(225, 5, 3, args)
    print("25 static inputs, 5 copied, 3 outputs; microseconds a call" + ("" if few["native"] else " (in Python)"))
    for name, what in (
        ("program", "the program"),
        ("replay", "of it the graph's bare replay"),
        ("around", "of it around the replay"),
        ("fill", "filling 5 static buffers, called alone"),
        ("collect", "laying out 3 outputs, called alone"),
    ):
        print(f"  {what:45s} {few[name]:7.2f}")
    for how, cost in free.items():
        print(f"  {f'ranges, no profiler, {how}':45s} {cost:7.3f}")
    print(f"  each further static input, nanoseconds        {(many['around'] - few['around']) / 200 * 1000:7.1f}")


if __name__ == "__main__":
    main()
