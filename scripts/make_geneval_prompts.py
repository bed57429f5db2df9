"""Write GenEval's 553 benchmark prompts with their records: `python scripts/make_geneval_prompts.py`.

The rule is flowrl/data/geneval_prompts.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from flowrl.data.geneval_prompts import lines as lines

FILE = Path(__file__).resolve().parents[1] / "assets" / "prompts" / "geneval.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FILE)
    out = parser.parse_args().out
    out.write_text("\n".join(lines()) + "\n", encoding="ascii", newline="\n")
    print(f"{out}: {len(lines())} prompts")


if __name__ == "__main__":
    main()
