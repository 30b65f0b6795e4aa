"""The bill of a dry run beside what the device counts once everything is recorded.

    python -m hostcuda benchmarks/bill.py                     # torch's CUDA build, no GPU
    python -m hostcuda benchmarks/bill.py --models gpt2 unet --modes training

The ten models of ``memory_trees.py``, inference and training, at four batch sizes each, with the device's kernels not
computed (``HOSTCUDA_COMPUTE=0``). Each in a process of its own: ``fxwrap.record(..., dry_run=True)`` for each size
alone and for all of them, then the recordings. "counted" is what torch's allocator has afterwards above what it had
before: the segments of graphs' pools, and what is allocated outside of them. The exit code is 1 if a bill is below
what is counted, or more than 2% above it.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import torch
from memory_peak import in_a_process, loss_of
from memory_trees import MIB, MODELS

import fxwrap

SIZES = (8, 4, 2, 1)  # batch; the largest first
MOST = 1.02
# Dynamo cannot trace these with a dynamic batch (associative_scan, gradients): each size has code of its own.
STATIC = {("mamba", "training")}


def measure(name: str, mode: str) -> dict[str, Any]:
    """Bills and counts, of each size alone and of all, in this process."""
    from cuda_memory import kept_bytes  # memory_peak has tests/ on the path

    torch.manual_seed(0)
    training = mode == "training"
    model, fresh = MODELS[name]()
    model = model.train(training).cuda()
    given = {key: value.cuda() for key, value in fresh().items()}
    given = {key: torch.cat([value] * max(1, SIZES[0] // value.shape[0])) for key, value in given.items()}
    rows = {batch: {key: value[:batch].contiguous() for key, value in given.items()} for batch in SIZES}
    found = []
    for sizes in (*((batch,) for batch in SIZES), SIZES):
        torch._dynamo.reset()

        def compute(**values: Any) -> Any:
            return loss_of(model(**values)) if training else model(**values)

        compiled = torch.compile(compute, backend="fxwrap", dynamic=False if (name, mode) in STATIC else None)

        def step(values: dict[str, torch.Tensor], compiled: Any = compiled) -> None:
            with torch.set_grad_enabled(training):
                result = compiled(**values)
                if training:
                    result.backward()
            model.zero_grad(set_to_none=True)

        examples = [(rows[batch],) for batch in sizes]
        bill = fxwrap.record(step, *examples, dry_run=True)
        before = kept_bytes()
        fxwrap.record(step, *examples)
        found.append((sizes, bill.total, kept_bytes() - before))
        fxwrap.release()
        del compiled, step, compute
    return {"found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--modes", nargs="+", default=["inference", "training"], choices=["inference", "training"])
    parser.add_argument("--measure", nargs=2, metavar=("MODEL", "MODE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(*args.measure)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: python -m hostcuda benchmarks/bill.py")
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}; MiB: bill / counted\n")
    columns = [*(f"batch {batch}" for batch in SIZES), "all", "least", "most"]
    print("| model | | " + " | ".join(columns) + " |\n" + "|---" * (len(columns) + 2) + "|")
    missed = []
    for name in args.models:
        for mode in args.modes:
            found = in_a_process(__file__, name, mode, HOSTCUDA_COMPUTE="0")["found"]
            ratios = [bill / count for _, bill, count in found]
            cells = [f"{bill / MIB:.1f} / {count / MIB:.1f}" for _, bill, count in found]
            row = [name, mode, *cells, f"{min(ratios):.4f}", f"{max(ratios):.4f}"]
            print(f"| {' | '.join(row)} |", flush=True)
            if min(ratios) < 1 or max(ratios) > MOST:
                missed.append(f"{name} ({mode})")
    print(f"\nmissed: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
