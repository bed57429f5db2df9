"""What a program writes to a terminal."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Mapping


def in_terminal(
    *words: str, columns: int = 80, until: str = "", environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """(exit code, output) of `python WORDS` in a terminal, with Ctrl-C once it shows `until`; "": never."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm", "PYTHONIOENCODING": "utf-8"} | dict(environment or {})
        os.execv(sys.executable, [sys.executable, *words])
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    output, pressed = b"", not until
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # how a terminal ends on Linux
            break
        if not part:
            break
        output += part
        if not pressed and until.encode() in output:
            pressed = bool(os.write(terminal, b"\x03"))
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), output.decode()
