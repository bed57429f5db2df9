"""`flowrl watch`: the report of runs under way in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flowrl.commands._arguments import argument, option
from flowrl.commands.gallery import Accept

Runs = Annotated[list[Path], argument("RUN", "Run folders, under way or ended; several are compared.")]
Port = Annotated[
    int | None,
    option(
        "TCP port.",
        "0 takes any free one. Default: 8420, or one of the next where that is in use.",
        least=0,
        most=65535,
    ),
]
Open = Annotated[
    bool | None,
    typer.Option(
        "--open/--no-open",
        help="Open the page in a browser.\n\nDefault: where there is a display. Else its address is printed.",
    ),
]


def command(runs: Runs, port: Port = None, open_page: Open = None, accept: Accept = False) -> None:
    """Serve the live report of runs to browsers of this machine, until Ctrl-C. It only reads the run folders."""
    import os
    import webbrowser

    from flowrl.gallery.server import Server

    os.nice(10)  # the run comes first
    with Server(runs, port, accept_changes=accept) as server:
        print(f"watching {', '.join(map(str, runs))} at {server.address} (Ctrl-C ends it; the runs go on)", flush=True)
        here = _has_display()
        if not here:
            print(_tunnel(server.server_address[1]), flush=True)
        if here if open_page is None else open_page:
            webbrowser.open(server.address)
        server.serve_forever()


def _has_display() -> bool:
    """Whether a browser that is started here shows up before the user."""
    import os
    import sys

    if "SSH_CONNECTION" in os.environ:
        return False
    return sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _tunnel(port: int) -> str:
    """What a user types on their own machine to see the page."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user of this number
        user = str(os.getuid())
    there = f"{user}@{socket.gethostname()}"
    return f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {there}, then open http://127.0.0.1:{port}/ there"
