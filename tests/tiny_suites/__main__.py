"""Write a suite's tiny prompts: `python -m tests.tiny_suites NAME FOLDER` prints what `--prompts` takes."""

import sys
from pathlib import Path

from flowrl.evaluation.suite import load_suite
from tests import tiny_suites

name, folder = sys.argv[1], Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
print(tiny_suites.prompts(name, load_suite(name), folder))
