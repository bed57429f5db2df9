"""Several training runs in one group of processes, so that a test pays for their start once.

`python -m tests.ranks JOBS` is one process of the group; JOBS is a JSON file with one list of words per run, as
`flowrl train` takes them: a YAML file, overrides, `--resume`.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowrl.core import registry
from flowrl.run.launch import free_port
from tests import native
from tests import tiny_pipelines as tiny

SIZES = "sizes.json"


def use_tiny_pipelines(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """From here on `model.path: tiny:CASE` of a native family is that pipeline of tests/tiny_pipelines, in memory."""
    for name in registry.names("models"):
        module = registry.load("models", name)
        if hasattr(module, "FAMILY"):
            patch(module, "build", functools.partial(_build, module.FAMILY.adapter, module.build))


def _build(kind: Callable[..., Any], build: Any, config: Any) -> Any:
    if not config.path.startswith("tiny:"):
        return build(config)
    pipe = tiny.make(config.path.removeprefix("tiny:"))
    return kind(pipe if config.dtype == "float32" else native.halved(pipe), config)


def run(jobs: list[list[str]], processes: int = 2, timeout_s: float = 300) -> None:
    """Train all jobs, one after another, in a new group of processes; fails with their output."""
    file = Path("jobs.json")
    file.write_text(json.dumps(jobs))
    shared = os.environ | {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ranks", str(file)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(processes)
    ]
    try:
        outputs = [child.communicate(timeout=timeout_s)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert all(child.returncode == 0 for child in children), "\n".join(outputs)


def sizes(trainer: Any) -> dict[str, int]:
    """Values of the denoiser: on this process, in all, and what the optimizer keeps moments of."""
    own = [getattr(p, "_local_tensor", p) for p in trainer.session.model.network.parameters()]
    return {
        "own": sum(p.numel() for p in own),
        "all": sum(p.numel() for p in trainer.session.model.network.parameters()),
        "moments": sum(p.numel() for p in trainer.session.optimizer.parameters),
    }


def main() -> None:
    from flowrl.config.load import load_config, resolve
    from flowrl.run.trainer import Trainer
    from flowrl.training.world import World

    use_tiny_pipelines()
    World.close = lambda self: None  # type: ignore[method-assign]  # the group serves all jobs
    for words in json.loads(Path(sys.argv[1]).read_text()):
        resume = "--resume" in words
        file, *overrides = [word for word in words if word != "--resume"]
        trainer = Trainer(resolve(load_config(file, overrides)))
        trainer.fit(resume=resume)
        every = trainer.world.gather(sizes(trainer))
        if trainer.world.main:
            (trainer.folder.path / SIZES).write_text(json.dumps(every))
    sys.stdout.flush()
    os._exit(0)  # as flowrl itself leaves a group


if __name__ == "__main__":
    main()
