"""The memory plan in the format of ``torch.cuda.memory._snapshot``, which pytorch.org/memory_viz shows.

A snapshot has one segment for each device, and a trace of the allocations and frees of one call. A microsecond of the
trace is one step.
"""

from __future__ import annotations

import re
from typing import Any

from .memory_map import MemoryData, StorageData


def snapshot_of(memory: MemoryData) -> dict[str, Any]:
    """The snapshot of the memory at the end of a call."""
    by_device: dict[str, list[StorageData]] = {}
    for storage in memory["storages"]:
        by_device.setdefault(storage["device"], []).append(storage)
    end = memory["steps"] + 1
    segments = []
    for number, storages in enumerate(by_device.values()):
        size = max(storage["address"] + storage["bytes"] for storage in storages)
        live = [storage for storage in storages if storage["end"] >= end]
        segments.append(_segment(number, size, sorted(live, key=lambda storage: storage["address"])))
    return {
        "segments": segments,
        "device_traces": list(map(_trace, by_device.values())),
        "allocator_settings": {},
        "external_annotations": [],
    }


def _trace(storages: list[StorageData]) -> list[dict[str, Any]]:
    events = [(storage["begin"], 1, "alloc", storage) for storage in storages]
    events += [(storage["end"], 0, "free_completed", storage) for storage in storages]
    return [
        {
            "action": action,
            "addr": storage["address"],
            "size": storage["bytes"],
            "time_us": step,
            "stream": 0,
            **_frames(storage),
        }
        for step, _, action, storage in sorted(events, key=lambda event: event[:2])
    ]


def _segment(device: int, size: int, storages: list[StorageData]) -> dict[str, Any]:
    used = sum(storage["bytes"] for storage in storages)
    blocks, at = list[dict[str, Any]](), 0
    for storage in storages:
        if storage["address"] > at:
            blocks.append(_block(at, storage["address"] - at, "inactive", {"frames": []}))
        blocks.append(_block(storage["address"], storage["bytes"], "active_allocated", _frames(storage)))
        at = storage["address"] + storage["bytes"]
    if at < size:
        blocks.append(_block(at, size - at, "inactive", {"frames": []}))
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
        "blocks": blocks,
    }


def _block(address: int, size: int, state: str, frames: dict[str, Any]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, **frames}


def _frames(storage: StorageData) -> dict[str, Any]:
    """The frames of an allocation: the storage as the innermost, then the line of user code that it comes from."""
    frames = [{"filename": storage["use"], "line": 0, "name": storage["name"]}]
    if where := re.match(r"(.*), line (\d+): (.*)", storage["user_line"], re.DOTALL):
        file, line, code = where.groups()
        frames.append({"filename": file, "line": int(line), "name": code})
    return {"frames": frames}
