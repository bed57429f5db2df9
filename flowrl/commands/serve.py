"""`flowrl serve`: rewards over HTTP, for runs on other machines or in other environments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from flowrl.commands._arguments import option

Rewards = Annotated[
    list[str],
    option(
        "Reward to serve: a name, dotted path or .py file.",
        "May be given again.",
        name="--reward",
    ),
]
Port = Annotated[int, option("TCP port; 0 takes a free one.", least=0, most=65535)]
Host = Annotated[str, option("Address to listen at.", "One that other machines reach requires a token.")]
Settings = Annotated[
    list[str] | None,
    option("Option of the reward, key=value.", "May be given again. Of several rewards NAME.key=value.", name="--set"),
]
TokenFile = Annotated[Path | None, option("File that holds the bearer token.", "Requests without it are refused.")]
TokenEnv = Annotated[str | None, option("Environment variable with the token.", "In place of a file.")]
Workers = Annotated[int, option("Processes for each reward.", "Each of them loads its own copy of it.", least=1)]
MaxBatch = Annotated[int, option("Largest batch, in samples.", "Of those that a reward is given.", least=1)]
MaxWait = Annotated[
    float,
    option(
        "Longest wait for a batch, in milliseconds.",
        "For it to fill. Longer: larger batches and slower answers.",
        least=0,
    ),
]
MaxItems = Annotated[int, option("Largest request, in samples.", least=1)]
MaxBody = Annotated[float, option("Largest body of a request, in MB.", least=0.01)]
MaxPixels = Annotated[int, option("Most pixels of a request.", "Of all its images together.", least=1)]
Score = Annotated[
    float, option("Time limit of a batch, in seconds.", "A reward that exceeds it is started again.", least=0.1)
]
Request = Annotated[float, option("Time limit of a request, in seconds.", least=0.1)]
Grace = Annotated[float, option("Time after SIGTERM, in seconds.", "To finish open requests.", least=0)]


def command(
    reward: Rewards,
    port: Port = 8100,
    host: Host = "127.0.0.1",
    options: Settings = None,
    token_file: TokenFile = None,
    token_env: TokenEnv = None,
    workers: Workers = 1,
    max_batch: MaxBatch = 64,
    max_wait_ms: MaxWait = 20,
    max_items: MaxItems = 256,
    max_body_mb: MaxBody = 64,
    max_pixels: MaxPixels = 1 << 26,
    score_s: Score = 120,
    request_s: Request = 900,
    grace_s: Grace = 30,
) -> None:
    """Serve rewards over HTTP until a signal. A run reads them by `remote`."""
    from flowrl.apps.command_line import reward_entries
    from flowrl.apps.serving.messages import Limits

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
    import signal

    from flowrl.apps.serving.app import Service
    from flowrl.apps.serving.batching import Batcher
    from flowrl.apps.serving.counters import Counters
    from flowrl.apps.serving.listener import bind, run
    from flowrl.apps.serving.process import Worker, WorkerFailed
    from flowrl.core.errors import ConfigError

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


def _require_extra() -> None:
    from importlib.util import find_spec

    from flowrl.core.errors import ConfigError, Remedy

    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"flowrl serve needs a package that is not installed ({missing[0]})",
            remedies=[Remedy(command="pip install 'flowrl[serve]'")],
        )


def _token(host: str, file: Path | None, variable: str | None) -> str | None:
    """The bearer token; never from the command line, which every user of the machine can read.

    Raises:
        ConfigError: there is none where one was named, or where the server can be reached from other machines.
    """
    import ipaddress
    import os

    from flowrl.core.errors import ConfigError, Remedy

    if file is not None and variable is not None:
        raise ConfigError(
            "--token-file and --token-env: one of them names the token",
            remedies=[Remedy(without="--token-file"), Remedy(without="--token-env")],
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
