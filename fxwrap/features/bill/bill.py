"""``fxwrap.record(..., dry_run=True)``: the memory that recordings would keep, before anything is captured."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

_WIDTH = 118


@dataclass(frozen=True)
class RecordingBill:
    """What a program would record at one set of sizes, in bytes.

    Attributes:
        program: the program's name.
        sizes: the sizes that vary, by symbol.
        arena: the bytes of the arena that it needs, or, on the CPU, that are kept for its temporaries. Recordings
            share them: their largest need counts.
        copied_in: of these, static input buffers.
        own: what is kept for it alone: static buffers of eager results, and results that operators allocate.
        graphs: the number of device graphs. A driver keeps memory for these, too, which is not in the bill.
        kernels, library_calls: how many the graphs launch. A kernel is a node of a graph, a library call one or more.
        not_kept: why there would be no recording in the end (``max_memory``, ``max_recordings``, an operator that
            cannot be captured); empty if there would be one.
    """

    program: str
    sizes: Mapping[str, Any]
    arena: int
    copied_in: int
    own: int
    graphs: int
    kernels: int
    library_calls: int
    not_kept: str = ""


@dataclass(frozen=True)
class DeviceBill:
    """What the recordings would keep on one device between calls, in bytes.

    Attributes:
        arenas: temporaries, outputs and static input buffers; shared by all recordings. On the CPU temporaries only,
            and as much again for each further call that runs at the same time.
        pools: the segments in which graphs allocate: results and temporaries of operators, workspaces of libraries.
        workspaces: of these, what libraries keep for one stream (cuBLAS).
        static_buffers: static buffers of eager results between partitions.
        temporaries_known: whether ``pools`` is known. Without a ``MemPool`` in the device's module it is not, and
            results that graphs keep count as static buffers.
    """

    device: torch.device
    arenas: int
    pools: int
    workspaces: int
    static_buffers: int
    temporaries_known: bool = True

    @property
    def total(self) -> int:
        return self.arenas + self.pools + self.static_buffers


@dataclass(frozen=True)
class Bill:
    """The memory that recordings of some calls would keep between calls. ``str()`` makes a table of it.

    It counts these recordings as if there were no others. Recordings of other functions share the arena and the
    pool, so that all together keep less than the sum of their bills.

    Attributes:
        devices: without the CPU if its recordings keep nothing, because they need little.
        recordings: for each program and each set of sizes that was called, in the order of the calls.
    """

    devices: tuple[DeviceBill, ...]
    recordings: tuple[RecordingBill, ...]

    @property
    def total(self) -> int:
        """Bytes on all devices."""
        return sum(device.total for device in self.devices)

    @property
    def not_kept(self) -> tuple[RecordingBill, ...]:
        """Those without a recording in the end."""
        return tuple(recording for recording in self.recordings if recording.not_kept)

    def __str__(self) -> str:
        file = io.StringIO()
        console = Console(file=file, width=_WIDTH, color_system=None, highlight=False)
        kept = len(self.recordings) - len(self.not_kept)
        console.print(f"{kept} of {len(self.recordings)} recordings would be kept, with {self.total:,} bytes\n")
        if self.devices:
            console.print(_devices(self.devices), "")
        console.print(_recordings(self.recordings))
        for recording in self.not_kept:
            console.print(f"not kept: {recording.program}, {_sizes(recording)}: {recording.not_kept}")
        for bill in self.devices:
            if not bill.temporaries_known:
                console.print(f"{bill.device}: temporaries of graphs are not known; torch has no MemPool for it")
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def _devices(bills: Sequence[DeviceBill]) -> Table:
    columns = "device", "total", "arenas", "graph pools", "workspaces in them", "static buffers"
    table = _table(columns, left=1)
    for bill in bills:
        figures = bill.total, bill.arenas, bill.pools, bill.workspaces, bill.static_buffers
        table.add_row(str(bill.device), *(f"{figure:,}" for figure in figures))
    return table


def _recordings(bills: Sequence[RecordingBill]) -> Table:
    columns = "program", "sizes", "arena", "copied in", "own", "graphs", "kernels", "library calls"
    table = _table(columns, left=2)
    for bill in bills:
        figures = bill.arena, bill.copied_in, bill.own, bill.graphs, bill.kernels, bill.library_calls
        table.add_row(bill.program, _sizes(bill), *(f"{figure:,}" for figure in figures))
    return table


def _table(columns: Sequence[str], left: int) -> Table:
    """Args: left: the number of columns that are aligned to the left."""
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number < left else "right")
    return table


def _sizes(bill: RecordingBill) -> str:
    return ", ".join(f"{symbol}={value}" for symbol, value in bill.sizes.items()) or "-"
