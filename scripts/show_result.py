"""Print a finished run's base and tuned metric with intervals, and where the report is."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    metric = summary["primary"]

    def line(label: str, key: str, sign: str = "") -> str:
        value = summary[key][metric]
        numbers = ", ".join(format(100 * value[name], f"{sign}.1f") for name in ("low", "high"))
        return f"{label:<28}{format(100 * value['mean'], f'{sign}.1f'):>7} %   95 % interval [{numbers}]"

    count, what = summary["base"][metric]["n"], summary["evaluated_on"]
    print(f"\n{metric} on {count} {what}, {summary['seconds']:.0f} s in all")
    print(line("base", "base"))
    print(line("tuned", "tuned"))
    print(line("paired difference", "difference", "+"))
    for model in ("base", "tuned") if "tuned_best_guidance" in summary else ():
        scale = summary[f"{model}_best_guidance"]["guidance_scale"]
        print(line(f"{model}, best CFG ({scale:g})", f"{model}_best_guidance"))
    if "tuned_best_guidance" in summary:
        print(line("paired, each at its best", "difference_best_guidance", "+"))
    print(f"report: {(folder / 'gallery' / 'index.html').resolve()}")


if __name__ == "__main__":
    main()
