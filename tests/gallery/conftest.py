"""Large synthetic runs, as scripts/bench_report.py makes them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench_report() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
        import bench_report

        return bench_report
