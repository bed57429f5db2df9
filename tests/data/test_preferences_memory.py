"""A preference set larger than memory streams: 50,000 pairs of 64 x 64 pictures stay under 2 GB."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.test_layers import ROOT

COUNT = 50_000
LIMIT_MIB = 2e9 / 2**20
DISTINCT = 1000


def noise() -> list[bytes]:
    """PNGs of 12 KB: noise does not compress, so the set is 1.2 GB."""
    rng, made = np.random.default_rng(0), []
    for _ in range(DISTINCT):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file, "PNG", compress_level=1)
        made.append(file.getvalue())
    return made


def epoch(source: Path, method: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.preference_epoch", str(source), method],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    print(source.name, method, found)
    return found


def check(found: dict, count: int) -> None:
    assert found["drawn"] == found["different"] == count
    assert found["sizes"] == [[64, 64]]
    assert found["peak_mib"] < LIMIT_MIB


@pytest.mark.slow
def test_an_epoch_over_files_stays_in_memory(tmp_path):
    (tmp_path / "base").mkdir()
    for k, content in enumerate(noise()):
        (tmp_path / "base" / f"{k}.png").write_bytes(content)
    # A file each, whose content is shared: what is read is the same, and the disk is spared.
    with (tmp_path / "pairs.jsonl").open("w") as lines:
        for k in range(COUNT):
            folder = tmp_path / f"{k // 1000:03d}"
            folder.mkdir(exist_ok=True)
            names = [f"{folder.name}/{k}-{side}.png" for side in "wl"]
            for place, name in enumerate(names):
                os.link(tmp_path / "base" / f"{(2 * k + place) % DISTINCT}.png", tmp_path / name)
            lines.write(json.dumps({"prompt": f"caption {k // 4}", "chosen": names[0], "rejected": names[1]}) + "\n")
    check(epoch(tmp_path, "pairs"), COUNT)


@pytest.mark.slow
def test_an_epoch_over_parquet_shards_stays_in_memory(tmp_path):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    made = noise()
    for shard in range(10):
        rows = range(shard * COUNT // 10, (shard + 1) * COUNT // 10)
        columns = {
            "caption": [f"caption {k // 4}" for k in rows],
            "jpg_0": [made[2 * k % DISTINCT] for k in rows],
            "jpg_1": [made[(2 * k + 1) % DISTINCT] for k in rows],
            "label_0": [float(k % 2) for k in rows],
            "image_0_uid": [f"{k}-0" for k in rows],
            "image_1_uid": [f"{k}-1" for k in rows],
        }
        file = tmp_path / f"part-{shard:02d}.parquet"
        options = {"row_group_size": 500, "use_dictionary": False, "compression": "NONE"}
        parquet.write_table(pa.table(columns), file, **options)
    check(epoch(tmp_path, "pairs"), COUNT)
    check(epoch(tmp_path, "labelled"), 2 * COUNT)
