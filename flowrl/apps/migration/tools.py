"""The tools whose configurations can be converted."""

from pathlib import Path

from flowrl.apps.migration import diffusion_dpo, flow_factory, flow_grpo, trl
from flowrl.apps.migration.table import Tool, read_table
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.registry import suggest

_MODULES = {"flow_grpo": flow_grpo, "diffusion_dpo": diffusion_dpo, "trl": trl, "flow_factory": flow_factory}
_REWARDS = {"flow_grpo": flow_grpo.REWARDS, "flow_factory": flow_factory.REWARDS}
TOOLS: dict[str, Tool] = {
    name: Tool(name, module.KEYS, module.read, module.rules, _REWARDS.get(name, {}), **read_table("tools", name))
    for name, module in _MODULES.items()
}
"""Name -> tool, in the order of docs/migration.md."""


def tool_of(file: str, name: str | None) -> Tool:
    """The tool that `--from` names, or that the file's ending tells.

    Raises ConfigError: an unknown name, or an ending that several tools, or none, have.
    """
    known = ", ".join(TOOLS)
    if name is not None:
        if name not in TOOLS:
            raise ConfigError(f"--from {name}: there is no such tool; {suggest(name, list(TOOLS))}there are: {known}")
        return TOOLS[name]
    guesses = {".py": "flow_grpo", ".sh": "diffusion_dpo", ".yaml": "flow_factory", ".yml": "flow_factory"}
    path = file.rpartition(":")[0] if ".py:" in file else file
    guess = guesses.get(Path(path).suffix)
    if guess not in TOOLS:
        raise ConfigError(
            f"{file}: its ending does not tell which tool wrote it; give --from, one of {known}. Those of others, such "
            "as SimpleTuner, OneTrainer or kohya's scripts, are not converted: for a configuration to start from",
            Remedy(command="flowrl new config mine --model tiny-sd3 --reward shapes"),
        )
    return TOOLS[guess]
