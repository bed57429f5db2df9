"""What is asked of a suite: which models, how their samples are made, who judges them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.core.errors import ConfigError, Remedy
from flowrl.evaluation.suite import name_of
from flowrl.run.dial import Dial


@dataclass(frozen=True, slots=True)
class Making:
    """How samples are made."""

    samples: int | None
    steps: int | None
    guidance: float | None
    settings: Sequence[str]
    limit: int | None
    seed: int
    batch_size: int
    processes: int


@dataclass(frozen=True, slots=True)
class Judging:
    """Who judges, and how."""

    names: Sequence[str]
    settings: Sequence[str]
    pair_name: str | None
    pair_settings: Sequence[str]
    export: Path | None
    results: Sequence[Path]
    rejudge: bool
    compat: bool


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line; their help is in flowrl/commands/eval.py."""

    target: str
    suite: str
    base: str | None
    loras: Sequence[str]
    prompts: Path | None
    making: Making
    judging: Judging
    out: Path | None
    dial: Dial | None = None

    @property
    def name(self) -> str:
        """The suite's; of a file its stem."""
        return name_of(self.suite)

    @property
    def folder(self) -> Path:
        """Folder of the results."""
        if self.out is not None:
            return self.out
        target = Path(self.target)
        if (target / "config.yaml").is_file():
            return target / "suites" / f"{self.name}{'' if self.dial is None else self.dial.tag}"
        return Path("eval") / f"{self.name}-{target.stem if target.suffix else target.name}"

    def models(self) -> dict[str, str]:
        """Name of the folder -> the model."""
        return {"model": self.target} | ({} if self.base is None else {"base": self.base})


def require_results_alone(options: Options) -> None:
    """Refuse --results of another number of models, or next to what judges or exports here."""
    judging = options.judging
    if len(judging.results) != len(options.models()):
        raise ConfigError("--results: give one file for MODEL, and with --base a second one, of the base")
    idle = {"--judge": judging.names, "--judge-set": judging.settings, "--export": judging.export}
    given = " ".join(name for name, value in idle.items() if value)
    if given:
        words = f"{given}: --results takes the scores of the official evaluator"
        raise ConfigError(words, Remedy(without=given))
