"""Everything that only a GPU can tell, in one command, without network or installation.

    PYTHONPATH=. python benchmarks/gpu.py                    # on the GPU of this machine; or: make gpu
    PYTHONPATH=. python benchmarks/gpu.py --only memory      # checks whose name has this in it
    PYTHONPATH=. python benchmarks/gpu.py --list
    PYTHONPATH=. python benchmarks/gpu.py --device hostsim   # on the simulated accelerator, as far as that goes
    PYTHONPATH=. python -m hostcuda benchmarks/gpu.py --small # torch's CUDA build on a device of host memory

The most valuable checks run first. Each prints its line when it ends, and with --results FILE it is a line of JSON in
there at once, too, so that a run that is cut short tells what it can. They share a process; after one that fails, and
for one that may leave the device unusable or that counts memory, there is a new one. What is raised is printed to
stderr in full. Ten minutes on an H200 are the limit that it is written for, not a result.

Exit code: 0 if no check failed, 1 if one did, 77 if there is no GPU (the code of a test that was skipped).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NO_GPU = 77
# An answer of a process that runs checks; whatever else it prints is not meant for us.
_ANSWER = "fxwrap-check: "
_MARKS = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}


@dataclass(frozen=True)
class Outcome:
    verdict: str  # passed, failed, skipped
    text: str

    def line(self, name: str, seconds: float) -> str:
        said = f"skipped: {self.text}" if self.verdict == "skipped" else self.text
        return f"{_MARKS[self.verdict]} {name} ({seconds:.1f} s): {said}"


class Worker:
    """A process that runs checks, one after the other, as long as nothing went wrong."""

    def __init__(self, device: str, faults: list[str], environment: Mapping[str, str], small: bool) -> None:
        self.environment = dict(environment)
        # Read through a file object of its own: the process's has another position.
        self._stderr = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self._errors, self._told = open(self._stderr.name, errors="replace"), 0  # noqa: SIM115
        command = [sys.executable, __file__, "--device", device, "--worker"]
        command += [part for fault in faults for part in ("--plant", fault)]
        command += ["--small"] * small
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env={**os.environ, **own, **environment},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def run(self, name: str, limit: float) -> Outcome:
        """Run one check; whatever happens to the process is that check's failure."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return Outcome("failed", f"its process ended before ({self._said_last()})")
        deadline = time.monotonic() + limit
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return Outcome("failed", f"no end after {limit:.0f} s")
            if line is None:
                code = self._process.wait()
                return Outcome("failed", f"its process ended with code {code} ({self._said_last()})")
            if line.startswith(_ANSWER):
                return Outcome(**json.loads(line[len(_ANSWER) :]))

    def errors(self) -> str:
        """What the process has written to stderr since this was last asked."""
        self._errors.seek(self._told)
        text = self._errors.read()
        self._told = self._errors.tell()
        return text

    def _said_last(self) -> str:
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1].strip() if lines else "it said nothing"

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._errors.close()
        self._stderr.close()


def work(device: str, faults: list[str], small: bool) -> None:
    """What a worker does: run the checks whose names it is given, and answer each with one line."""
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples" / "hostsim")]
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from gpu_checks import checks, run
    from gpu_place import Place, Skipped

    torch.set_num_threads(1)
    place, known = Place.entered(device, small), checks()
    for fault in faults:
        place.module.plant_fault(fault)
    for line in sys.stdin:
        name = line.rstrip("\n")
        try:
            findings = run(name, known[name], place)
            said = [*findings.faults, *findings.notes]
            answer = {"verdict": "failed" if findings.faults else "passed", "text": "; ".join(said)}
        except Skipped as reason:
            answer = {"verdict": "skipped", "text": str(reason)}
        print(f"{_ANSWER}{json.dumps(answer)}", flush=True)


def run_all(
    names: list[str], device: str, faults: list[str], limit: float, small: bool = False, results: Path | None = None
) -> dict[str, Outcome]:
    """Run the checks, in this order; what each came to is printed, and added to ``results``, at once."""
    from gpu_checks import checks

    known, outcomes = checks(), dict[str, Outcome]()
    worker: Worker | None = None
    try:
        for name in names:
            entry = known[name]
            if worker is not None and (entry.alone or entry.environment != worker.environment):
                worker.end()
                worker = None
            begin = time.perf_counter()
            if entry.only_on and device not in entry.only_on:
                outcome = Outcome("skipped", entry.because)
            else:
                worker = worker or Worker(device, faults, entry.environment, small)
                outcome = worker.run(name, limit)
            outcomes[name] = outcome
            seconds = time.perf_counter() - begin
            print(outcome.line(name, seconds), flush=True)
            if results is not None:
                _add(results, {"check": name, **asdict(outcome), "seconds": round(seconds, 1)})
            if worker is not None and outcome.verdict == "failed":
                print(worker.errors(), file=sys.stderr, flush=True)
            if worker is not None and (entry.alone or outcome.verdict == "failed"):
                worker.end()
                worker = None
    finally:
        if worker is not None:
            worker.end()
    return outcomes


def _add(results: Path, entry: dict[str, Any]) -> None:
    with results.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "xpu", "hostsim"], help="default: the GPU of this machine")
    parser.add_argument(
        "--only", metavar="TEXT", nargs="+", default=[""], help="checks whose name has one of these in it"
    )
    parser.add_argument("--list", action="store_true", help="print the names, in order, and end")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="for one check")
    parser.add_argument("--plant", action="append", default=[], metavar="FAULT", help="a fault of hostsim's")
    parser.add_argument("--small", action="store_true", help="sizes that a CPU does at once, as for hostsim")
    parser.add_argument("--results", type=Path, metavar="FILE", help="add each result to it, as JSON in one line")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        work(args.device, args.plant, args.small)
        return 0
    import torch
    from gpu_checks import checks
    from gpu_place import first_gpu

    names = [name for name in checks() if any(text in name for text in args.only)]
    if args.list:
        print("\n".join(names))
        return 0
    device = args.device or first_gpu()
    if device is None:
        print(
            f"no GPU: torch {torch.__version__} finds neither CUDA nor XPU here (--device hostsim runs without one)"
        )
        return NO_GPU
    begin = time.perf_counter()
    print(f"{len(names)} checks on {_described(device)}, torch {torch.__version__}", flush=True)
    if args.results is not None:
        python = ".".join(map(str, sys.version_info[:3]))
        _add(args.results, {"device": _described(device), "torch": torch.__version__, "python": python})
    outcomes = run_all(names, device, args.plant, args.limit, args.small, args.results)
    counted = Counter(outcome.verdict for outcome in outcomes.values())
    failed = [name for name, outcome in outcomes.items() if outcome.verdict == "failed"]
    summary = ", ".join(f"{counted[verdict]} {verdict}" for verdict in _MARKS)
    print(f"{summary} in {time.perf_counter() - begin:.0f} s; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


def _described(device: str) -> str:
    module: Any = None if device == "hostsim" else __import__("torch").get_device_module(device)
    return device if module is None or not module.is_available() else f"{device} ({module.get_device_name()})"


if __name__ == "__main__":
    sys.exit(main())
