"""`flowrl serve`: rewards over HTTP, for runs on other machines or in other environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    reward: Annotated[list[str], typer.Option("--reward", help="Name, dotted path, or .py file; may be repeated.")],
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 8100,
    host: Annotated[str, typer.Option("--host", help="Another than this machine's own wants a token.")] = "127.0.0.1",
    options: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the reward; NAME.key=value where there are several.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option("--token-file", help="File that holds the bearer token.")] = None,
    token_env: Annotated[str | None, typer.Option("--token-env", help="Environment variable that holds it.")] = None,
    workers: Annotated[int, typer.Option("--workers", help="Processes for each reward.", min=1)] = 1,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Samples handed to a reward at once.", min=1)] = 64,
    max_wait_ms: Annotated[float, typer.Option("--max-wait-ms", help="A batch waits this long to fill.", min=0)] = 20,
    max_items: Annotated[int, typer.Option("--max-items", help="Samples of a request.", min=1)] = 256,
    max_body_mb: Annotated[float, typer.Option("--max-body-mb", help="Body of a request.", min=0.01)] = 64,
    max_pixels: Annotated[int, typer.Option("--max-pixels", help="Of a request's pictures together.", min=1)] = 1 << 26,
    score_s: Annotated[float, typer.Option("--score-s", help="Time limit of a batch in the reward.", min=0.1)] = 120,
    request_s: Annotated[float, typer.Option("--request-s", help="Time limit of a request.", min=0.1)] = 900,
    grace_s: Annotated[float, typer.Option("--grace-s", help="For what was begun, after SIGTERM.", min=0)] = 30,
) -> None:
    """Serve rewards until a signal; train with the reward `remote`."""
    from flowrl.scoring.server.messages import Limits

    _require_extra()
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
    _serve(entries(reward, options or []), host, port, limits, token, workers, grace_s, batching)


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
    import signal

    from flowrl.core.errors import ConfigError
    from flowrl.scoring.server.app import Service
    from flowrl.scoring.server.batching import Batcher
    from flowrl.scoring.server.counters import Counters
    from flowrl.scoring.server.listener import bind, run
    from flowrl.scoring.server.process import Worker, WorkerFailed

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
        raise ConfigError(str(error)) from None


def entries(rewards: list[str], options: list[str]) -> dict[str, dict[str, Any]]:
    """Name -> entry of each reward, as a configuration has it.

    Raises:
        ConfigError: two of one name, or an option that does not say whose it is.
    """
    from flowrl.core.errors import ConfigError
    from flowrl.core.strict import apply_override

    trees: dict[str, dict[str, Any]] = {}
    for word in rewards:
        name = Path(word).stem if word.endswith(".py") else word
        if name in trees:
            raise ConfigError(f"--reward {word}: two rewards are called {name!r}; serve one of them on another port")
        trees[name] = {"path" if word.endswith(".py") else "name": word}
    for word in options:
        key, _, _ = word.partition("=")
        # A dotted module path is a name with dots: the longest that fits is meant.
        owner = max((name for name in trees if key.startswith(f"{name}.")), key=len, default=None)
        if owner is None and len(trees) > 1:
            raise ConfigError(f"--set {word}: say whose it is, NAME.key=value with NAME one of {', '.join(trees)}")
        name = owner or next(iter(trees))
        apply_override(trees[name], word.removeprefix(f"{owner}."))
    return trees


def _require_extra() -> None:
    from importlib.util import find_spec

    from flowrl.core.errors import ConfigError

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f'flowrl serve needs a package that is not installed ({missing[0]}): run pip install "flowrl[serve]"'
        )


def _token(host: str, file: Path | None, variable: str | None) -> str | None:
    """The bearer token; never from the command line, which every user of the machine can read.

    Raises:
        ConfigError: there is none where one was named, or where the server can be reached from other machines.
    """
    import ipaddress
    import os

    from flowrl.core.errors import ConfigError

    if file is not None and variable is not None:
        raise ConfigError("give --token-file or --token-env, not both")
    token = None
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise ConfigError(f"--token-file {file}: {error.strerror or error}") from None
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
