"""Install this checkout into a virtual environment: by uv where it can be had, otherwise by pip, several times slower.

    python scripts/install.py FOLDER CONSTRAINTS REQUIREMENT...

The first requirement is the checkout with its extras, such as `.[dev]`, and is installed editable. uv comes from the
package index that pip knows, lies in FOLDER/uv, and is told of pip's own settings. What an interrupted installation
left incomplete is installed anew; nothing else of FOLDER is removed. Needs the standard library alone.
"""

from __future__ import annotations

import ast
import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

GIGABYTE = 1e9
NEEDED = "FLOWRL_DISK_GB"
"""Environment variable: free space that is asked for, in GB; default: 7, with extras 8."""
SETTINGS = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
}
"""Setting of pip -> the environment variable by which uv takes it."""


class Refused(Exception):
    """What keeps the installation from its start, in words for the user."""


def main(words: Sequence[str]) -> int:
    """Install; the exit code: 2 where something is missing, else that of the last installer."""
    folder, constraints, *requirements = words
    try:
        _install(Path(folder), constraints, requirements)
    except Refused as error:
        print(f"flowrl: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"flowrl: not installed: {error}. The lines above say why; the next call goes on", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nflowrl: interrupted; the next call goes on with what is there", file=sys.stderr)
        return 130
    return 0


def _install(folder: Path, constraints: str, requirements: Sequence[str]) -> None:
    present, broken = 0, list[str]()
    for site in folder.glob("lib/python*/site-packages"):
        for record, size, complete in distributions(site):
            present += size
            if not complete:
                broken.append(record.name.partition("-")[0])
                shutil.rmtree(record)  # without it both installers take the package as missing
    require_room(folder, float(os.environ.get(NEEDED) or (8 if "[" in requirements[0] else 7)) * GIGABYTE - present)
    python = folder / "bin" / "python"
    if _fails(python, "-m", "pip", "--version"):
        print(f"[1/3] a virtual environment in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    what = ["--constraint", constraints, "--editable", *requirements, "pip"]
    uv = _uv(folder, python)
    if uv is not None:
        print("[3/3] the libraries, about 3 GB of downloads where no cache has them", flush=True)
        settings = _settings(folder, uv, python)
        if broken:  # their files may be one with the cache's
            subprocess.run([uv, "cache", "clean", *broken], env=settings, check=True)
        # The newest pip, as an installation by pip has it.
        command = [uv, "pip", "install", "--python", python, "--upgrade-package", "pip"]
        if os.environ.get("PYTHONDONTWRITEBYTECODE"):  # else the first import of each library compiles it
            command.append("--compile-bytecode")
        done = subprocess.run([*command, *what], env=settings)
        if done.returncode <= 0:  # negative: of a signal
            done.check_returncode()
            return
        print("uv could not install them: pip tries", flush=True)
    print("[3/3] the libraries by pip, several minutes and about 3 GB of downloads", flush=True)
    subprocess.run([python, "-m", "pip", "install", "--upgrade", "pip"], check=True)
    subprocess.run([python, "-m", "pip", "install", *what], check=True)


def distributions(site: Path) -> Iterator[tuple[Path, int, bool]]:
    """Each installed package: its folder `.dist-info`, the bytes of its files, and whether all that it lists is there.

    An installer writes the list, RECORD, last, so that one that is missing tells of an interruption. Files whose size
    differs are cut off.
    """
    for folder in sorted(site.glob("*.dist-info")):
        size, complete, record = 0, (folder / "RECORD").is_file(), folder / "RECORD"
        for name, _, listed in csv.reader(record.read_text(encoding="utf-8").splitlines()) if complete else ():
            file = site / name
            there = file.stat().st_size if file.is_file() else -1
            size += max(there, 0)
            # Compiled files may go and come; no size: the list itself.
            complete = complete and (not listed or there == int(listed) or name.endswith(".pyc"))
        yield folder, size, complete


def require_room(folder: Path, needed: float) -> None:
    """Refuse a disk that has fewer than `needed` bytes for the environment in `folder`, which may be missing.

    Raises:
        Refused: with what there is and what is needed.
    """
    free = shutil.disk_usage(_existing(folder)).free
    if free < needed:
        raise Refused(
            f"the disk is too small: the libraries need {needed / GIGABYTE:.1f} GB more in {folder.absolute()}, where "
            f"{free / GIGABYTE:.1f} GB are free. Make room, or clone flowrl to a larger disk. Most of it is what torch "
            f"needs for GPUs: if your package index has torch without that, {NEEDED}=2 asks for less"
        )


def _existing(path: Path) -> Path:
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def _fails(*command: str | Path) -> bool:
    try:
        return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode != 0
    except OSError:  # there is no such file
        return True


def _uv(folder: Path, python: Path) -> Path | None:
    """uv's program, from pip where it is not there yet; None where it cannot be had."""
    home = folder / "uv"
    program = home / "bin" / "uv"
    if _fails(program, "--version"):
        print("[2/3] uv, which installs faster than pip", flush=True)
        shutil.rmtree(home, ignore_errors=True)
        # Apart from the environment's own packages. A prebuilt one: its source needs a compiler of Rust.
        if _fails(python, "-m", "pip", "install", "--only-binary", ":all:", "--target", home, "uv"):
            print("uv cannot be had here", flush=True)
            return None
    return None if _fails(program, "--version") else program


def _settings(folder: Path, uv: Path, python: Path) -> dict[str, str]:
    """The environment in which uv installs what pip would."""
    asked = subprocess.run([python, "-m", "pip", "config", "list"], capture_output=True, text=True)
    result = pip_settings(asked.stdout) | {"UV_HTTP_TIMEOUT": "180"}
    cache = Path(subprocess.run([uv, "cache", "dir"], capture_output=True, text=True).stdout.strip() or folder)
    # Files are linked from the cache into the environment, which is possible on one disk only.
    if _existing(cache).stat().st_dev != _existing(folder).stat().st_dev:
        result["UV_CACHE_DIR"] = str(folder.absolute() / "cache")
    return result | os.environ


def pip_settings(listed: str) -> dict[str, str]:
    """uv's variables for pip's settings, as `pip config list` prints them: those of the environment win over files.

    With several indexes pip takes the best version of all, and uv that of the first which has the package at all,
    unless it is told.

    >>> pip_settings("global.extra-index-url='a\\\\nb'\\nglobal.timeout='9'")
    {'UV_INDEX': 'a b', 'UV_INDEX_STRATEGY': 'unsafe-best-match'}
    """
    found: dict[str, str] = {}
    for scope in ("global", "install", ":env:"):
        for line in listed.splitlines():
            key, _, value = line.partition("=")
            variable = SETTINGS.get(key.removeprefix(f"{scope}."))
            if variable is not None:
                parts = str(ast.literal_eval(value)).split()
                found[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(parts)
    return found | ({"UV_INDEX_STRATEGY": "unsafe-best-match"} if "UV_INDEX" in found else {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
