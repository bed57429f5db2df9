"""`flowrl watch`: the report of runs under way in a browser."""

import os
from pathlib import Path

from flowrl.commands._browser import show


def command(runs: list[Path], port: int | None = None, open_page: bool | None = None, accept: bool = False) -> None:
    """Serve the live report of runs to a browser. On this machine, until Ctrl-C. It only reads the run folders."""
    from flowrl.apps.gallery.server import Server

    os.nice(10)  # the run comes first
    with Server(runs, port, accept_changes=accept) as server:
        print(f"watching {', '.join(map(str, runs))} at {server.address} (Ctrl-C ends it; the runs go on)", flush=True)
        show(server.address, open_page)
        server.serve_forever()
