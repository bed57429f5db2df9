"""What a report costs: build one of synthetic runs, and print its size, CPU seconds, seconds and peak memory.

    python -m scripts.bench gallery [--prompts 200] [--seeds 4] [--size 512] [--runs 1] [--paint] [--keep FOLDER]
    python -m scripts.bench gallery --watch --rows 10000 [--paint] ...

The second is the live page of a run with so many rows of 45 numbers: seconds from the start of the server's process to
the first page, megabytes of the page and of what is sent, CPU seconds of a question with nothing new and of the parts
after a new row, and seconds until Chromium has painted and answered.

The images are noise with the spectrum of photographs, 32 different files under the names of all images, so that the
disk stays small; each is read and embedded as often as it has names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
from PIL import Image

from flowrl.apps.gallery import build
from flowrl.evaluation.results import Evaluation

DISTINCT = 32
WORDS = [
    "a",
    "photo",
    "of",
    "two",
    "red",
    "cubes",
    "on",
    "the",
    "wet",
    "street",
    "under",
    "an",
    "old",
    "bridge",
    "at",
    "night",
    "with",
    "lanterns",
]


def peak_bytes() -> int:
    """Peak of this process's resident memory. The module that knows it imports torch, which is larger than a report."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def photo(rng: np.random.Generator, size: int) -> Image.Image:
    """Noise whose amplitude falls with frequency to the power of 1.5, with one brightness for three colours."""
    frequency = np.fft.fftfreq(size)
    radius = np.hypot(frequency[:, None], frequency[None])
    radius[0, 0] = 1.0
    light = rng.standard_normal((size, size))
    planes = []
    for _ in range(3):
        spectrum = np.fft.fft2(0.8 * light + 0.3 * rng.standard_normal((size, size))) / radius**1.5
        plane = np.fft.ifft2(spectrum).real
        planes.append((plane - plane.mean()) / plane.std())
    return Image.fromarray(np.clip(128 + 55 * np.stack(planes, -1), 0, 255).astype(np.uint8))


def write_run(
    folder: Path, prompts: int, seeds: int, size: int, words: int = 12, distinct: int = DISTINCT, number: int = 0
) -> Path:
    """A finished run with two metrics and images of `prompts` x `seeds` pairs, `distinct` files under their names.

    Runs of other numbers have the same prompts and other scores.
    """
    rng = np.random.default_rng(0)
    (folder / "files").mkdir(parents=True)
    for i in range(distinct):
        photo(rng, size).save(folder / "files" / f"{i}.png", compress_level=1)
    texts = [f"{' '.join(rng.choice(WORDS, words))}, number {p}" for p in range(prompts)]
    blocks, rng = {}, np.random.default_rng(number)
    for place, tag in enumerate(("base", "tuned")):
        (folder / "eval" / tag).mkdir(parents=True)
        scores = {name: rng.normal(0.2 * place, 1, (prompts, seeds)) for name in ("pickscore", "aesthetic")}
        blocks[tag] = {name: {"mean": float(table.mean())} for name, table in scores.items()}
        for p in range(prompts):
            for k in range(seeds):
                source = folder / "files" / f"{rng.integers(distinct)}.png"
                os.link(source, folder / "eval" / tag / f"{p:05d}-{k}.png")
        marks, sharp = np.full((prompts, seeds), ""), np.full((prompts, seeds), 0.1)
        kept = (tuple(texts), seeds, scores, marks, sharp, tuple(range(prompts)))
        Evaluation(tag, 40 * place, 4.5, 20, *kept).save(folder / "eval")
    rows = [{"iteration": i, "reward/pickscore_mean": i / 40, "time/iteration_s": 2.0} for i in range(1, 41)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = {"status": "finished", "iterations": 40, "primary": "pickscore", **blocks}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "provenance.json").write_text("{}")
    (folder / "config.yaml").write_text(f"name: synthetic-{number}\niterations: 40\neval: {{tie: 0.05}}\n")
    return folder


def write_rows(folder: Path, count: int) -> None:
    """Rows of 45 numbers, noise around a trend with rare large values, in place of those of `write_run`."""
    rng = np.random.default_rng(0)
    names = [f"policy/number_{i}" for i in range(40)]
    names = ["reward/pickscore_mean", "time/iteration_s", "grad/norm", "policy/clip_fraction", "perf/cpu_s", *names]
    trend = np.linspace(0, 1, count)[:, None] + 0.3 * rng.standard_normal((count, len(names)))
    spikes = rng.random(trend.shape) < 2e-4
    table = np.abs(np.where(spikes, 20 * trend, trend))
    rows = [{"iteration": i} | dict(zip(names, row.tolist(), strict=True)) for i, row in enumerate(table, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("iterations: 40", f"iterations: {count}"))


WATCH = """
import sys, threading, time
from pathlib import Path
from flowrl.apps.gallery.server import Server
server = Server([Path(name) for name in sys.argv[1:]], 0)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.address, flush=True)
for line in sys.stdin:
    print(time.process_time(), flush=True)
"""


def watched(folders: list[Path], paint: bool) -> dict[str, object]:
    """What the live page of some runs costs."""
    start = time.monotonic()
    program = [sys.executable, "-c", WATCH, *map(str, folders)]
    server = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    address = server.stdout.readline().strip()

    def get(name: str, **headers: str) -> bytes:
        with urllib.request.urlopen(urllib.request.Request(address + name, headers=headers)) as answer:
            return answer.read()

    def cpu() -> float:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write("\n")
        server.stdin.flush()
        return float(server.stdout.readline())

    page = get("")
    result: dict[str, object] = {"first_page_s": round(time.monotonic() - start, 2), "start_cpu_s": round(cpu(), 2)}
    result |= {"megabytes": round(len(page) / 1e6, 2)}
    result |= {"sent_megabytes": round(len(get("", **{"Accept-Encoding": "gzip"})) / 1e6, 2)}
    before = cpu()
    for _ in range(200):
        state = json.loads(get("state"))
    result["poll_cpu_ms"] = round((cpu() - before) * 5, 2)
    if paint:
        result |= answered(address)
    with (folders[0] / "metrics.jsonl").open("r+") as file:
        last = json.loads(file.read().splitlines()[-1])
        file.write(json.dumps(last | {"iteration": last["iteration"] + 1}) + "\n")
    time.sleep(float(json.loads(get("parts?have="))["took_s"]) * 21)
    before = cpu()
    changes = get(f"parts?have={state['version']}")
    result |= {"refresh_cpu_s": round(cpu() - before, 2), "refresh_megabytes": round(len(changes) / 1e6, 2)}
    server.terminate()
    server.wait()
    return result


def answered(address: str, loads: int = 5) -> dict[str, object]:
    """Seconds until Chromium paints a page of a server, and until its script has run and shows the state."""
    from tests.apps.gallery.browser import launched

    paints, ready = [], []
    with launched() as browser:
        for _ in range(loads):
            with browser.new_context() as session:
                page, start = session.new_page(), time.monotonic()
                page.goto(address)
                page.locator(".live[data-state]").wait_for()
                ready.append(round(time.monotonic() - start, 2))
                first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                paints.append(round(first / 1000, 2))
    return {"first_paint_s": paints, "ready_s": ready}


def first_paints(page_file: Path, loads: int = 5) -> list[float]:
    """Seconds until Chromium paints the first content of the page, of each load."""
    from tests.apps.gallery.browser import launched, opened

    paints = []
    with launched() as browser:
        for _ in range(loads):
            with opened(browser, page_file) as page:
                first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
                paints.append(round(first / 1000, 2))
    return paints


def report(
    sizes: tuple[int, int, int, int], runs: int, rows: int, *, paint: bool, watch: bool, keep: Path | None
) -> str:
    """The result as JSON.

    Args:
        sizes: prompts, seeds, side of an image in pixels and words of a prompt, of each run.
        runs: more than one: their comparison.
        rows: rows of metrics.jsonl, of 45 numbers; 0: 40 rows of 2.
        paint: open the page in Chromium five times, too.
        watch: the live page instead of the report.
        keep: an empty folder for the runs; None: a temporary one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        place = keep or Path(temporary)
        names = ["run", *(f"run-{number}" for number in range(1, runs))]
        folders = [write_run(place / name, *sizes, number=number) for number, name in enumerate(names)]
        for folder in folders if rows else ():
            write_rows(folder, rows)
        if watch:
            return json.dumps(watched(folders, paint))
        cpu, wall = time.process_time(), time.monotonic()
        page = build(folders)
        result = {
            "megabytes": round(page.stat().st_size / 1e6, 2),
            "cpu_s": round(time.process_time() - cpu, 2),
            "seconds": round(time.monotonic() - wall, 2),
            "peak_mb": round(peak_bytes() / 2**20),
        }
        if paint:
            result["first_paint_s"] = first_paints(page)
    return json.dumps(result)
