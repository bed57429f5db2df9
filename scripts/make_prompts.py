"""Write the captions of the shapes world to `assets/prompts/`: `python scripts/make_prompts.py`.

Running it again changes nothing; a test compares the files with `prompts` of `flowrl.shapes` and
`flowrl.moving_shapes`.
"""

from __future__ import annotations

from pathlib import Path

from flowrl import moving_shapes, shapes

FOLDER = Path(__file__).resolve().parents[1] / "assets" / "prompts"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for part in ("train", "heldout"):
        for name, captions in (("shapes", shapes.prompts(part)), ("shapes-motion", moving_shapes.prompts(part))):
            file = FOLDER / f"{name}-{part}.txt"
            file.write_text("\n".join(captions) + "\n", encoding="ascii", newline="\n")
            print(f"{file}: {len(captions)} captions")


if __name__ == "__main__":
    main()
