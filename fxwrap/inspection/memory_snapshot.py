"""The memory plan in the format of ``torch.cuda.memory._snapshot``, which pytorch.org/memory_viz shows.

One segment for each device, and the trace of a call: what is allocated at a step, and freed after the last. A
microsecond of the trace is one step.
"""

from __future__ import annotations

import re
from typing import Any

from .memory_map import MemoryData, StorageData


def snapshot_of(memory: MemoryData) -> dict[str, Any]:
    """A snapshot as it would be at the end of a call."""
    devices = list(dict.fromkeys(one["device"] for one in memory["storages"]))
    traces = [_trace([one for one in memory["storages"] if one["device"] == device]) for device in devices]
    end = memory["steps"] + 1
    segments = []
    for number, device in enumerate(devices):
        there = [one for one in memory["storages"] if one["device"] == device]
        size = max(one["address"] + one["bytes"] for one in there)
        last = sorted((one for one in there if one["end"] >= end), key=lambda one: one["address"])
        segments.append(_segment(number, size, last))
    return {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }


def _trace(storages: list[StorageData]) -> list[dict[str, Any]]:
    events = [(one["begin"], 1, "alloc", one) for one in storages]
    events += [(one["end"], 0, "free_completed", one) for one in storages]
    return [
        {"action": action, "addr": one["address"], "size": one["bytes"], "time_us": step, "stream": 0, **_frames(one)}
        for step, _, action, one in sorted(events, key=lambda event: event[:2])
    ]


def _segment(device: int, size: int, blocks: list[StorageData]) -> dict[str, Any]:
    used = sum(one["bytes"] for one in blocks)
    found, at = list[dict[str, Any]](), 0
    for one in blocks:
        if one["address"] > at:
            found.append(_block(at, one["address"] - at, "inactive", {"frames": []}))
        found.append(_block(one["address"], one["bytes"], "active_allocated", _frames(one)))
        at = one["address"] + one["bytes"]
    if at < size:
        found.append(_block(at, size - at, "inactive", {"frames": []}))
    return {
        "device": device,
        "address": 0,
        "total_size": size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": found,
    }


def _block(address: int, size: int, state: str, frames: dict[str, Any]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, **frames}


def _frames(storage: StorageData) -> dict[str, Any]:
    """The storage as the innermost frame, and the line of the user's that it comes from."""
    frames = [{"filename": storage["use"], "line": 0, "name": storage["name"]}]
    if where := re.match(r"(.*), line (\d+): (.*)", storage["user_line"], re.DOTALL):
        file, line, code = where.groups()
        frames.append({"filename": file, "line": int(line), "name": code})
    return {"frames": frames}
