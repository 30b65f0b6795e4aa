"""Run sequences by their numbers, and print how many calls were compared, and what differs.

    python tests/fuzz/sweep.py --device simulated --sequences 5000
    python tests/fuzz/sweep.py --device hostsim --sequences 1000 --pool 20
    python -m hostcuda tests/fuzz/sweep.py --device gpu --sequences 300
    python tests/fuzz/sweep.py --device cpu --first 117 --sequences 1 --shrink
    FXWRAP_NATIVE_REPLAY=0 python tests/fuzz/sweep.py            # without native replay

Sequence n is the same in every run with the same pool. Compiling the programs of a pool takes most of the time of a
short run; ``--minutes`` ends a long one. Exit code 1 if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from conftest import DEVICES, all_in_lanes, launches_compared  # noqa: E402
from sequences import (  # noqa: E402
    DifferenceError,
    Pool,
    Sequence_,
    program_alone,
    random_sequence,
    run,
    shrunk,
    torch_settings,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu")
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first sequence")
    parser.add_argument("--pool", type=int, default=40, help="programs that sequences are drawn over")
    parser.add_argument("--seed", type=int, default=0, help="of the pool")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no sequence after so many")
    parser.add_argument("--lanes", type=int, default=1, help="threads, with all work in lanes that may be")
    parser.add_argument("--shrink", action="store_true", help="make what differs small, and print it as a program")
    given = parser.parse_args()
    torch.set_num_threads(1)
    in_lanes = all_in_lanes(given.lanes) if given.lanes > 1 else contextlib.nullcontext()
    warnings.simplefilter("ignore")
    begin, calls, differences, done = time.monotonic(), 0, [], 0
    with DEVICES[given.device]() as device, torch_settings(), launches_compared(), in_lanes:
        pool = Pool(device, given.seed)
        for number in range(given.first, given.first + given.sequences):
            if time.monotonic() - begin > 60 * given.minutes:
                break
            sequence = random_sequence(random.Random(number), given.pool)
            try:
                calls += run(sequence, pool, device)
            except Exception as error:
                differences.append(number)
                print(f"sequence {number}, programs {sequence.programs}: {error}\n", flush=True)
                if not isinstance(error, DifferenceError):
                    traceback.print_exc()
                if given.shrink:
                    print(_small(sequence, pool, device), flush=True)
            done += 1
        counts = _counts(pool)
    took = time.monotonic() - begin
    print("| device | programs | sequences | calls compared | replays | recordings | eager | differences | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    row = (given.device, len(pool), done, calls, *(counts[what] for what in ("replays", "recordings", "eager")))
    print(f"| {' | '.join(map(str, (*row, len(differences), round(took))))} |")
    return bool(differences)


def _small(sequence: Sequence_, pool: Pool, device: torch.device) -> str:
    small, variants = shrunk(sequence, pool, device)
    return "\n".join([*map(program_alone, variants), *map(str, small.steps), ""])


def _counts(pool: Pool) -> Counter[str]:
    found = Counter[str]()
    for program in pool.programs():
        counters = program.counters
        found.update(
            replays=counters.replays,
            recordings=sum(counters.recordings.values()),
            eager=sum(counters.eager.values()),
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
