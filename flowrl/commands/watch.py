"""`flowrl watch`: the report of runs under way in a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from flowrl.commands._arguments import argument
from flowrl.commands._browser import Open, Port, show
from flowrl.commands.gallery import Accept

Runs = Annotated[list[Path], argument("RUN", "Run folders, under way or ended; several are compared.")]


def command(runs: Runs, port: Port = None, open_page: Open = None, accept: Accept = False) -> None:
    """Serve the live report of runs to a browser. On this machine, until Ctrl-C. It only reads the run folders."""
    import os

    from flowrl.apps.gallery.server import Server

    os.nice(10)  # the run comes first
    with Server(runs, port, accept_changes=accept) as server:
        print(f"watching {', '.join(map(str, runs))} at {server.address} (Ctrl-C ends it; the runs go on)", flush=True)
        show(server.address, open_page)
        server.serve_forever()
