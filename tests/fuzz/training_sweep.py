"""Run training programs by their numbers beside the ordinary loop; print how many calls were compared, what differs.

    python tests/fuzz/training_sweep.py --programs 300
    python tests/fuzz/training_sweep.py --device simulated --programs 100
    python -m hostcuda tests/fuzz/training_sweep.py --device gpu --programs 30
    python tests/fuzz/training_sweep.py --form written
    python tests/fuzz/training_sweep.py --first 117 --programs 1 --shrink

Program n is the same in every run. Compiling takes nearly all of the time; ``--minutes`` ends a long run. Exit code 1
if anything differs.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import time
import traceback
import warnings
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from conftest import DEVICES, all_in_lanes, launches_compared  # noqa: E402
from training import DifferenceError, OurSide, differs, random_training, run, shrunk  # noqa: E402
from written import WrittenSide  # noqa: E402

from fxwrap.errors import causes  # noqa: E402

# What is refused with a reason, by a part of its text.
_REFUSED = (
    "data decide on the size of",  # which no limit can be held with
    "does not support running with fake tensors",  # CUDA's GRU cell with dynamic sizes
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=sorted(DEVICES), default="cpu")
    parser.add_argument("--form", choices=("loss", "written"), default="loss", help="of the step")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no program after so many")
    parser.add_argument("--lanes", type=int, default=1, help="threads, with all work in lanes that may be")
    parser.add_argument("--shrink", action="store_true", help="make what differs small, and print it")
    parser.add_argument("--show", action="store_true", help="print each program before it runs")
    given = parser.parse_args()
    torch.set_num_threads(1)
    in_lanes = all_in_lanes(given.lanes) if given.lanes > 1 else contextlib.nullcontext()
    warnings.simplefilter("ignore")
    side = WrittenSide if given.form == "written" else OurSide
    begin, calls, replays, refused, done, differences = time.monotonic(), 0, 0, 0, 0, []
    with DEVICES[given.device]() as device, launches_compared(), in_lanes:
        for number in range(given.first, given.first + given.programs):
            if time.monotonic() - begin > 60 * given.minutes:
                break
            training = random_training(random.Random(number))
            if given.show:
                print(f"program {number}\n{training}", flush=True)
            try:
                replays += run(training, device, side)
                calls += len(training.steps)
            except Exception as error:
                if any(text in str(cause) for cause in causes(error) for text in _REFUSED):
                    refused += 1
                else:
                    differences.append(number)
                    print(f"program {number}: {error}\n", flush=True)
                    if not isinstance(error, DifferenceError):
                        traceback.print_exc()
                    if given.shrink:
                        print(shrunk(training, device, functools.partial(differs, side=side)), flush=True)
            done += 1
    titles = "device", "programs", "refused", "calls compared", "replays", "differences", "s"
    took = round(time.monotonic() - begin)
    values = given.device, done, refused, calls, replays, len(differences), took
    for row in (titles, ["---"] * len(titles), values):
        print(f"| {' | '.join(map(str, row))} |")
    return bool(differences)


if __name__ == "__main__":
    sys.exit(main())
