"""docs/migration.md, from the tables of flowrl/apps/migration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import yaml

from flowrl.apps.migration.table import Key, Tool
from flowrl.apps.migration.tools import TOOLS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "migration.md"
HEAD = """# Coming from another tool

Written by `python -m scripts.pages` from `flowrl/apps/migration/`; do not edit.

`flowrl convert-config FILE` reads the configuration of another tool and writes a recipe of flowrl. The file is read as
text and never executed. Each line of the recipe has a comment with the key that it came from and the conversion; a key
without a counterpart is listed at the top of the recipe and on the error stream, with the reason.

```bash
{examples}
```

`--from` takes {tools}. Without `--from` the ending of the file says
which tool it is: `.py` flow_grpo, `.sh` diffusion_dpo, `.yaml` flow_factory. Files of TRL have these endings too, so
TRL needs `--from trl`.

- **GPUs.** Other tools state batch sizes per GPU; flowrl states totals over all processes. If the file does not say how
  many GPUs its run had, give `--gpus N`. A number that differs from the file's number is refused.
- **Unknown keys.** If the tool itself refuses unknown keys, flowrl refuses them too. Otherwise flowrl lists each
  unknown key with the nearest known name.
- **`--strict`** writes nothing and ends with exit code 2 if a key without a counterpart changes results. Keys of memory
  and logging, and keys that the tool does not read, change no results.
- **Check.** Before the recipe is written, flowrl reads the recipe as `flowrl train` would. Afterwards `flowrl plan
  RECIPE` shows what the run will do and need.
- **Paths** in the recipe are relative to the folder of `--out`, or to the working directory without `--out`. flowrl
  looks for files in the working directory, and for files of prompts in the other tool's folder too. If a file of
  prompts is in neither place, the recipe keeps the name, with the comment `not found`: put the file there, or correct
  `data`.
"""


def pages() -> dict[Path, str]:
    """The page and its whole text."""
    return {FILE: "\n".join([_head(), *(_section(tool) for tool in TOOLS.values())])}


def _head() -> str:
    examples = "\n".join(EXAMPLES[name] for name in TOOLS)
    tools = ", ".join(f"`{name}`" for name in TOOLS)
    return "\n".join(line.rstrip() for line in HEAD.format(examples=examples, tools=tools).split("\n"))


EXAMPLES = {
    "flow_grpo": "flowrl convert-config flow_grpo/config/grpo.py:general_ocr_sd3 --out recipe.yaml",
    "diffusion_dpo": "flowrl convert-config DiffusionDPO/launchers/sd15.sh --gpus 16 --out recipe.yaml",
    "trl": "flowrl convert-config ddpo.sh --from trl --gpus 1 --out recipe.yaml",
    "flow_factory": "flowrl convert-config examples/grpo/lora/sd3_5.yaml --out recipe.yaml",
}


def _section(tool: Tool) -> str:
    lines = ["", f"## {tool.name}", "", f"{tool.title}. FILE: {tool.form}.", ""]
    lines += ["| key | default | flowrl | conversion, or the reason why there is none |", "|---|---|---|---|"]
    lines += [_row(name, key) for name, key in tool.keys.items()]
    lines += _rewards(tool)
    return "\n".join(lines) + "\n"


def _row(name: str, key: Key) -> str:
    default = yaml.safe_dump(
        list(key.default) if isinstance(key.default, tuple) else key.default, default_flow_style=True
    )
    default = default.removesuffix("\n").removesuffix("\n...").strip()
    options = ", ".join(f"`{option.strip()}`" for option in key.options.split(",")) if key.options else "none"
    grade = "" if key.options else ("; changes results" if key.changes else "; harmless")
    return f"| `{name}` | `{default}` | {options}{grade} | {key.how.replace('|', chr(92) + '|')} |"


def _rewards(tool: Tool) -> Iterator[str]:
    if tool.rewards:
        yield from ("", f"Rewards of {tool.name} (every other reward is listed as a key that changes results):", "")
        yield from ("| reward | flowrl | remark |", "|---|---|---|")
        for name, (entry, note) in tool.rewards.items():
            yield f"| `{name}` | `{yaml.safe_dump(entry, default_flow_style=True).strip()}` | {note} |"
