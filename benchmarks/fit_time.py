"""What it takes to plan a large program within ``memory_limit``, by the number of nodes of its host graph.

    python benchmarks/fit_time.py                    # 1,000 to 10,000 nodes, within half of what it takes
    python benchmarks/fit_time.py --nodes 10000 --share 0.75

The graph is that of a training step: a chain whose values are read again in reverse. Seconds of the stage ``fit``,
with the proof that the graph computes the same. Goal: 10,000 nodes in 5 s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "tests"))

from random_graphs import GraphMaker
from torch.fx import GraphModule

from fxwrap.limit import Limit
from fxwrap.options import Options
from fxwrap.passes.memory.fit import timeline_of
from fxwrap.passes.memory.requirements import expected_sizes
from fxwrap.pipeline import HostGraphPlanner
from fxwrap.plan import InputFacts, ProgramPlan

# An allocation and a launch, forward and backward, twice.
_NODES_OF_A_LAYER = 8


def training_step(nodes: int) -> GraphModule:
    maker = GraphMaker()
    x = maker.input("x")
    values = [x]

    def mixed(first: object, second: object, rows: int) -> object:
        made = maker.allocate((rows, 4))
        maker.launch("mix", first, second, made)
        return made

    for layer in range(nodes // _NODES_OF_A_LAYER):
        values.append(mixed(values[-1], values[-1], (4, 8, 16)[layer % 3]))
        values.append(mixed(values[-1], values[-1], 4))
    gradient = values[-1]
    for value in reversed(values[:-1]):
        gradient = mixed(gradient, value, 4)
    return maker.finish([gradient])


def fitted(nodes: int, share: float) -> tuple[int, ProgramPlan, float]:
    """The number of nodes, the plan within this share of the peak, and the seconds of the stage."""
    gm = training_step(nodes)
    planner = HostGraphPlanner(gm, Options(capture="always"))
    inputs = InputFacts()
    plan = planner.partition(inputs)
    peak = timeline_of(plan, expected_sizes(gm, plan.facts)).peak
    limited = planner.partition(inputs, limit=Limit(int(share * peak)))
    return len(gm.graph.nodes), limited, planner.took["fit"][1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1000, 3000, 10000])
    parser.add_argument("--share", type=float, default=0.5, help="the limit, as a share of what it takes without one")
    given = parser.parse_args()
    print("| nodes | repeated | s |\n|---|---|---|")
    for nodes in given.nodes:
        count, plan, seconds = fitted(nodes, given.share)
        print(f"| {count:,} | {len(plan.repeated):,} | {seconds:.2f} |", flush=True)


if __name__ == "__main__":
    main()
