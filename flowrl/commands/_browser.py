"""What the commands with a page of their own share: how it gets before the user's eyes."""


def show(address: str, open_page: bool | None) -> None:
    """Open a page of this machine in a browser, or print how another machine reaches it. `open_page` None: where there
    is a display.
    """
    import os
    import socket
    import sys
    import webbrowser
    from urllib.parse import urlsplit

    # Whether a browser that is started here shows up before the user.
    displays = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    here = displays and "SSH_CONNECTION" not in os.environ
    if not here:
        port, there = urlsplit(address).port or 80, f"{account(str(os.getuid()))}@{socket.gethostname()}"
        way = f"ssh -N -L {port}:127.0.0.1:{port} {there}, then open http://127.0.0.1:{port}/ there"
        print(f"from another machine: {way}", flush=True)
    if here if open_page is None else open_page:
        webbrowser.open(address)


def account(otherwise: str) -> str:
    """The user's name; `otherwise` in a container without a user of this number."""
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return otherwise
