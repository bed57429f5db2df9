"""Imports without looks for cycles: in flowrl's own processes only, and put back whatever happens."""

import subprocess
import sys


def test_a_program_that_uses_flowrl_keeps_its_collector():
    # In a process of its own: another test may have called the command line here.
    code = (
        "import gc\nfrom flowrl.core.startup import imports\n"
        "with imports():\n    assert gc.isenabled()\n    kept = [[] for _ in range(1000)]\n"
        "assert gc.isenabled() and gc.get_freeze_count() == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_command_collects_again_after_its_imports():
    code = (
        "import gc\nfrom flowrl.core.startup import imports, own_process\nown_process()\n"
        "before = gc.get_freeze_count()\n"
        "try:\n    with imports():\n        assert not gc.isenabled()\n        kept = [[] for _ in range(1000)]\n"
        "        with imports():\n            assert not gc.isenabled()\n        assert not gc.isenabled()\n"
        "        raise ImportError\nexcept ImportError:\n    pass\n"
        "assert gc.isenabled() and gc.get_freeze_count() >= before + 1000\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
