"""What fxwrap makes for a CUDA device, on a machine without one: ten models, and constructs that only CUDA has.

    python benchmarks/cuda_target.py                      # all of it, in ten minutes on two cores
    python benchmarks/cuda_target.py --only 'flex|gpt2'   # by name
    python benchmarks/cuda_target.py --results done.jsonl # goes on where it was

Inductor compiles each for ``cuda`` (sm_90) with fake tensors; schedules and memory plans are verified; every kernel
is compiled to a cubin, and every launch is compared with what the cubin takes (tests/cuda_lane.py). Prints a table
in Markdown, and ends with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

COLUMNS = (
    "program", "graphs", "nodes", "launches", "library calls", "kernels", "cubins", "captured", "eager", "arena, KiB",
    "in the kernels",
)  # fmt: skip


def work(names: list[str]) -> None:
    """In a worker process: examine cases, a line of JSON each on standard output."""
    from cuda_constructs import CASES
    from cuda_lane import examine

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names:
        print(json.dumps({"begun": name}), flush=True)
        begin, found = time.monotonic(), dict[str, Any]()
        torch._dynamo.reset()
        try:
            outcome = asdict(examine(CASES[name]))
            found = {key: sorted(value) if isinstance(value, set) else value for key, value in outcome.items()}
        except Exception as error:
            found = {"failure": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, "seconds": round(time.monotonic() - begin, 1), **found}), flush=True)


def outcomes(names: list[str], part: int, cache: Path | None = None) -> Iterator[dict[str, Any]]:
    """Outcomes in the order in which workers have them; a crash costs the case that was begun."""
    left = list(names)
    with tempfile.TemporaryDirectory(prefix="fxwrap-cuda-") as new:
        # Configurations are chosen by times that are made up: nobody else may find them in a cache.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache or new), "HF_HUB_OFFLINE": "1"}
        while left:
            worker = subprocess.Popen(
                [sys.executable, __file__, "--work", json.dumps(left[:part])],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
            )
            assert worker.stdout is not None
            begun = ""
            try:
                for line in worker.stdout:
                    fields: dict[str, Any] = {}
                    with contextlib.suppress(json.JSONDecodeError):
                        fields = json.loads(line)
                    if "begun" in fields:
                        begun = fields["begun"]
                    elif "name" in fields:
                        begun = ""
                        left.remove(fields["name"])
                        yield fields
                code = worker.wait()
            finally:
                worker.kill()  # whoever reads may have had enough
                worker.wait()
            if code != 0 and not begun:
                raise SystemExit(f"the worker ended with {code} before it began a case")
            if begun:
                left.remove(begun)
                yield {"name": begun, "seconds": 0.0, "failure": f"the process ended with {code}"}


def row(found: dict[str, Any]) -> str:
    """A line of the table."""
    if "failure" in found:
        return f"| {found['name']} | **failed**: {' '.join(found['failure'].split())[:200]} |"
    cells = [
        found["name"], len(found["phases"]), found["nodes"], found["launches"], found["externs"], found["kernels"],
        found["cubins"], found["captured"], found["eager"], f"{found['arena'] / 1024:,.1f}",
        ", ".join(found["constructs"]),
    ]  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def show(found: list[dict[str, Any]]) -> None:
    """The table, and what it adds up to."""
    print("| " + " | ".join(COLUMNS) + " |")
    print("|---|" + "---:|" * (len(COLUMNS) - 2) + "---|")
    for one in found:
        print(row(one))
    passed = [one for one in found if "failure" not in one]
    total = {key: sum(one[key] for one in passed) for key in ("launches", "kernels", "cubins", "checked", "plans")}
    print(
        f"\ntorch {torch.__version__}: {len(found)} programs, {len(found) - len(passed)} failed; "
        f"{total['launches']} launches of {total['kernels']} kernels, {total['cubins']} cubins, "
        f"{total['checked']} launches of a configuration checked, {total['plans']} memory plans verified"
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="cases whose name matches")
    parser.add_argument("--results", type=Path, help="file of what is done, read first and added to")
    parser.add_argument("--cache", type=Path, help="of kernels, and kept; without it, they are compiled anew")
    parser.add_argument("--part", type=int, default=10, help="cases that one worker process takes")
    parser.add_argument("--seconds", type=float, help="begin no more after so long")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.work is not None:
        work(json.loads(arguments.work))
        return 0
    from cuda_constructs import CASES

    names = [name for name in CASES if re.search(arguments.only, name)]
    if not names:
        raise SystemExit(f"no case matches {arguments.only!r}: {', '.join(CASES)}")
    done: dict[str, dict[str, Any]] = {}
    if arguments.results is not None and arguments.results.exists():
        done = {one["name"]: one for one in map(json.loads, arguments.results.read_text().splitlines())}
    begin = time.monotonic()
    with open(arguments.results or os.devnull, "a") as file:
        for found in outcomes([name for name in names if name not in done], arguments.part, arguments.cache):
            done[found["name"]] = found
            print(json.dumps(found), file=file, flush=True)
            print(f"{found['name']}: {found.get('failure', 'passed')} ({found['seconds']} s)", file=sys.stderr)
            if arguments.seconds is not None and time.monotonic() - begin > arguments.seconds:
                break
    show([done[name] for name in names if name in done])
    return 1 if any("failure" in done[name] for name in names if name in done) else 0


if __name__ == "__main__":
    sys.exit(main())
