"""The file metrics.jsonl of a run folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from flowrl.core.files import json_ready, read_rows, write_atomically, writing


class MetricsFile:
    """`metrics.jsonl`: one object per iteration, appended and on the disk at once; NaN is written as null."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def append(self, row: dict[str, Any]) -> None:
        with writing(self.file), self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(json_ready(row)) + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> list[dict[str, Any]]:
        """Complete rows; a torn last line of a killed run is dropped.

        Raises:
            ConfigError: another line is damaged.
        """
        return read_rows(self.file)[0]

    def truncate(self, iteration: int) -> None:
        """Drop rows past a checkpoint."""
        kept = [row for row in self.rows() if row["iteration"] <= iteration]
        write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in kept))
