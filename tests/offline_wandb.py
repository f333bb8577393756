"""Reads back what an offline W&B run wrote."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class OfflineRun:
    """What an offline W&B run wrote: a LevelDB log of protobuf records, 7-byte head `:W&B` 0xBEE1."""

    def __init__(self, folder: Path) -> None:
        import wandb

        wandb.teardown()  # its service writes on after `finish` returns: 1 read in 100 found a file cut short
        (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
        self.folder = path.parent
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.metrics: dict[str, dict[str, Any]] = {}
        for record in self._records(path.read_bytes()):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                self.history.append(self._items(record.history.item))
            elif kind == "summary":
                self.summary.update(self._items(record.summary.update))
            elif kind == "metric":
                summary = [field.name for field, _ in record.metric.summary.ListFields()]
                name = record.metric.name or record.metric.glob_name
                self.metrics[name] = {"step": record.metric.step_metric, "summary": summary}

    @staticmethod
    def _items(items: Any) -> dict[str, Any]:
        return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}

    @staticmethod
    def _records(data: bytes, block: int = 32768) -> Iterator[Any]:
        from wandb.proto import wandb_internal_pb2

        assert struct.unpack("<4sH", data[:6]) == (b":W&B", 0xBEE1)
        position, buffer = 7, b""
        while position + 7 <= len(data):
            left = block - position % block
            if left < 7:
                position += left
                continue
            _, size, kind = struct.unpack("<IHB", data[position : position + 7])
            chunk = data[position + 7 : position + 7 + size]
            position += 7 + size
            buffer = chunk if kind in (1, 2) else buffer + chunk  # 1 whole, 2 first, 3 middle, 4 last
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(buffer)
