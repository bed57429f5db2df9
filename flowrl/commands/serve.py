"""`flowrl serve`: rewards over HTTP, for runs on other machines or in other environments."""

import importlib.util
import ipaddress
import os
import signal
from pathlib import Path
from typing import Any

from flowrl.core.errors import ConfigError, Remedy


def command(
    reward: list[str],
    port: int = 8100,
    host: str = "127.0.0.1",
    options: list[str] | None = None,
    token_file: Path | None = None,
    token_env: str | None = None,
    workers: int = 1,
    max_batch: int = 64,
    max_wait_ms: float = 20,
    max_items: int = 256,
    max_body_mb: float = 64,
    max_pixels: int = 1 << 26,
    score_s: float = 120,
    request_s: float = 900,
    grace_s: float = 30,
) -> None:
    """Serve rewards over HTTP until a signal. A run reads them by `remote`."""
    from flowrl.apps.command_line import reward_entries
    from flowrl.apps.serving.messages import Limits

    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"flowrl serve needs a package that is not installed ({missing[0]})",
            Remedy(command="pip install 'flowrl[serve]'"),
        )
    token = _token(host, token_file, token_env)
    least, size = Limits(), round(max_body_mb * 1e6)
    limits = Limits(
        items=max_items,
        bytes=size,
        pixels=max_pixels,
        waiting=max(least.waiting, 4 * max_items),
        waiting_bytes=max(least.waiting_bytes, 4 * size),
        held_bytes=max(least.held_bytes, 4 * size),
        score_s=score_s,
        request_s=request_s,
    )
    batching = {"max_batch": max_batch, "max_wait_s": max_wait_ms / 1000}
    _serve(reward_entries(reward, options or [], prefixes=False), host, port, limits, token, workers, grace_s, batching)


def _serve(
    trees: dict[str, dict[str, Any]],
    host: str,
    port: int,
    limits: Any,
    token: str | None,
    workers: int,
    grace_s: float,
    batching: dict[str, Any],
) -> None:
    import asyncio

    from flowrl.apps.serving.app import Service
    from flowrl.apps.serving.batching import Batcher
    from flowrl.apps.serving.counters import Counters
    from flowrl.apps.serving.listener import bind, run
    from flowrl.apps.serving.process import Worker, WorkerFailed

    try:
        sock = bind(host, port)
    except OSError as error:
        raise ConfigError(f"--host {host} --port {port}: {error.strerror or error}") from None
    where = f"http://{f'[{host}]' if ':' in host else host}:{sock.getsockname()[1]}"
    counters = Counters()
    batchers = {
        name: Batcher(name, [Worker(tree) for _ in range(workers)], limits, counters, **batching)
        for name, tree in trees.items()
    }
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)  # uvicorn raises the signal again when it has finished what it had

    def ready(_: Any) -> None:
        print(f"serving {', '.join(trees)} on {where}", flush=True)

    try:
        asyncio.run(run(Service(batchers, limits, counters, token), sock, grace_s=grace_s, ready=ready))
    except WorkerFailed as error:
        raise ConfigError.about(error) from None


def _token(host: str, file: Path | None, variable: str | None) -> str | None:
    """The bearer token; never from the command line, which every user of the machine can read.

    Raises ConfigError: there is none where one was named, or where the server can be reached from other machines.
    """
    if file is not None and variable is not None:
        raise ConfigError(
            "--token-file and --token-env: one of them names the token",
            [Remedy(without="--token-file"), Remedy(without="--token-env")],
        )
    token = None
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--token-file {file}: {error.strerror or error}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"--token-file {file}: it is not text; give a file that holds the token alone") from None
    elif variable is not None:
        token = os.environ.get(variable, "").strip()
    if token is not None and not token:
        raise ConfigError(f"{'--token-file' if file else '--token-env'} {file or variable}: there is no token in it")
    if token is None:
        try:
            own = ipaddress.ip_address(host).is_loopback
        except ValueError:
            own = host == "localhost"
        if not own:
            raise ConfigError(
                f"--host {host}: other machines reach this address; give a token with --token-file or --token-env"
            )
    return token


def _leave(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)
