"""`scripts.bench serve`: load test of a reward server on one core, with many clients on the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 500.0
"""Images per second on one core: 64 x 64, reward `jpeg`, 16 per request, 32 clients."""
_SIDE = 64


def report(seconds: float, clients: int, items: int, core: int, warmup: float = 2.0) -> str:
    """The result in words.

    Raises:
        AssertionError: a score differs from the reward's in this process.
        SystemExit: the server does not start.
    """
    bodies, expected = requests(clients, items)
    with pinned_server(core) as (url, process):
        result = asyncio.run(_load(url, bodies, expected, warmup, seconds, process.pid))
    rate, spent, latencies = result["images"] / seconds, max(result["cpu"], 1e-3), sorted(result["latencies"])
    middle, late = (1000 * latencies[min(int(q * len(latencies)), len(latencies) - 1)] for q in (0.5, 0.99))
    verdict = f"target {TARGET:.0f}: {'met' if rate >= TARGET else 'missed'}"
    lines = (
        f"{rate:.0f} images/s on one core ({verdict}); a request of {items}: p50 {middle:.0f} ms, p99 {late:.0f} ms",
        f"{clients} clients, {result['images']} images of {_SIDE} x {_SIDE} noise as PNG in {seconds:g} s, every "
        "score right",
        f"the server had {spent / seconds:.0%} of its core: {result['images'] / spent:.0f} images a second of its "
        f"CPU time; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores",
    )
    return "\n".join(lines)


def requests(clients: int, items: int) -> tuple[list[list[dict[str, Any]]], list[list[float]]]:
    """(items of each client, with images of its own; their scores in this process)."""
    import torch

    from flowrl.core.wire import write_image
    from flowrl.media.transport import pack, unpack
    from flowrl.rewards import jpeg

    reward, generator = jpeg.build(jpeg.Config()), torch.Generator().manual_seed(0)
    bodies, expected = [], []
    for _ in range(clients):
        packed = [pack(torch.rand(3, _SIDE, _SIDE, generator=generator), "png") for _ in range(items)]
        scores = reward.score([unpack(image) for image in packed], [""] * items, [{}] * items)
        assert isinstance(scores, torch.Tensor)
        expected.append(scores.tolist())
        images = [write_image(image) for image in packed]
        bodies.append([{"id": str(k), "prompt": "", "metadata": {}, "image": p} for k, p in enumerate(images)])
    return bodies, expected


@contextlib.contextmanager
def pinned_server(core: int) -> Iterator[tuple[str, subprocess.Popen]]:
    """(address, process) of a server of `jpeg` whose workers all run on the core `core`."""
    words = [sys.executable, "-P", "-m", "flowrl", "serve", "--reward", "jpeg", "--port", "0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment)
    # Set before it starts anything: its children inherit the core.
    os.sched_setaffinity(process.pid, {core})
    rest = os.sched_getaffinity(0) - {core}
    os.sched_setaffinity(0, rest or {core})
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if " on http://" not in line:
            raise SystemExit(f"the server did not start (exit code {process.wait()})")
        yield line.split(" on ")[1].strip(), process
    finally:
        os.sched_setaffinity(0, rest | {core})
        process.terminate()
        process.wait(60)


async def _load(
    url: str, bodies: list[list[dict[str, Any]]], expected: list[list[float]], warmup: float, seconds: float, pid: int
) -> dict[str, Any]:
    import json
    import uuid

    import httpx

    from flowrl.core.wire import SCHEMA

    latencies: list[float] = []
    starts = time.perf_counter() + warmup
    ends = starts + seconds
    cpu = [0.0, 0.0]

    async def client(http: httpx.AsyncClient, items: list[dict[str, Any]], scores: list[float]) -> None:
        # Encoded once: the server is measured, not the client.
        text = json.dumps({"schema": SCHEMA, "request_id": "*ID*", "reward": "jpeg", "items": items}).encode()
        while (began := time.perf_counter()) < ends:
            body = text.replace(b"*ID*", uuid.uuid4().hex.encode(), 1)
            answer = await http.post(f"{url}/score", content=body, headers={"content-type": "application/json"})
            assert answer.status_code == 200, answer.text
            assert [row["scores"]["jpeg_kb"] for row in answer.json()["results"]] == scores, "a wrong score"
            took = time.perf_counter()
            if began >= starts and took <= ends:
                latencies.append(took - began)

    async def clock() -> None:
        await asyncio.sleep(max(starts - time.perf_counter(), 0))
        cpu[0] = cpu_seconds(pid)
        await asyncio.sleep(max(ends - time.perf_counter(), 0))
        cpu[1] = cpu_seconds(pid)

    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=None), trust_env=False) as http:
        await asyncio.gather(clock(), *(client(http, *one) for one in zip(bodies, expected, strict=True)))
    images = len(latencies) * len(bodies[0])
    return {"images": images, "cpu": cpu[1] - cpu[0], "latencies": latencies}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its descendants, from /proc, in seconds; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        # A child is listed with the thread that started it.
        children = [word for file in Path(f"/proc/{pid}/task").glob("*/children") for word in file.read_text().split()]
    except OSError:
        return 0.0
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(cpu_seconds(int(child)) for child in children)
