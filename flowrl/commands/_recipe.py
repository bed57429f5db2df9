"""A recipe from what a person knows, with the reasons as comments: `flowrl new config`."""

from __future__ import annotations

import copy
import json
import math
import os
import sys
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from flowrl.commands._listed import recipe_tree
from flowrl.commands._plan_answer import here, hours, needed, reward_bytes
from flowrl.commands._plan_data import data_here
from flowrl.commands.plan import estimated, outline, step_plan
from flowrl.config.components import model_component
from flowrl.config.load import load_config, resolve
from flowrl.config.resolved import Resolved
from flowrl.core import assets, registry
from flowrl.core.errors import ConfigError, Fault, Remedy
from flowrl.core.strict import load_tree, overridden
from flowrl.diffusion.process import FlowProcess
from flowrl.display.units import size
from flowrl.models.pipelines.classes import config_folder
from flowrl.models.pipelines.skeletons import UnknownModel, skeleton
from flowrl.planning.checkpointing import MARGIN
from flowrl.planning.hours import LEFT_OUT, seconds, table

CHOICES = load_tree(Path(__file__).parent / "starting" / "choices.yaml")
NUMBERS = ("memory", "hours")
ORDER = (
    "name",
    "iterations",
    "seed",
    "model",
    "data",
    "rewards",
    "algorithm",
    "rollout",
    "optim",
    "eval",
    "checkpoint",
)
SMALL_GB, LEAST, SHARE = 24, 10, 0.75
"""A small card; fewest iterations worth a start; their share of the hours, of which the rest is not measured."""


@dataclass(slots=True)
class Known:
    """What a person knows; `memory` in GB, None: this machine's."""

    model: str | None = None
    rewards: Sequence[str] = ()
    prompts: str | None = None
    pairs: str | None = None
    memory: float | None = None
    hours: float | None = None

    def ask(self) -> None:
        """Ask at a terminal for what is left out; an empty line leaves it out.

        Raises:
            ConfigError: no number, or what a recipe needs is left out.
        """
        other = {"rewards": "pairs", "pairs": "rewards"}
        for key, question in CHOICES["questions"].items() if sys.stdin.isatty() else ():
            own = asdict(self)
            if not own[key] and not own.get(other.get(key, "")) and (said := input(f"{question}: ").strip()):
                try:
                    setattr(self, key, said.split() if key == "rewards" else float(said) if key in NUMBERS else said)
                except ValueError:
                    raise ConfigError(f"{key}={said!r} must be a number") from None
        needs = {"--model tiny-sd3": self.model, "--reward shapes": self.rewards or self.pairs}
        if missing := [flag for flag, value in needs.items() if not value]:
            left = Remedy(flag=" ".join(missing))
            raise ConfigError("new config needs --model, and --reward or --pairs", remedies=[left])


def is_tiny(model: str) -> bool:
    """Whether a model is one of the package."""
    return assets.asset_folder(model, "model_index.json") is not None


class Draft:
    """A recipe that will lie in `folder`, planned; its text is `str`.

    Raises:
        ConfigError: a reward, model, prompts or pairs that cannot be used, or a memory or time that nothing fits.
    """

    def __init__(self, name: str, known: Known, folder: Path) -> None:
        self.known, self.folder, self.tiny = known, folder.resolve(), is_tiny(known.model)
        self.device, self.memory = here() if known.memory is None else ("", int(known.memory * 2**30))
        for reward in known.rewards:
            _require_sound(reward)
        self.why: dict[str, str] = {}
        chosen = self._chosen() | {"name": name}
        self._adapt({key: chosen[key] for key in (*ORDER, *sorted(chosen.keys() - {*ORDER})) if key in chosen})
        self._fit()
        self._spend()

    def _chosen(self) -> dict[str, Any]:
        """The recipe with this method and model, or with the method, changed to what is asked for."""
        known, every = self.known, {one: recipe_tree(one) for one in assets.recipes()}
        place, paths = config_folder(known.model), sorted({tree["model"]["path"] for tree in every.values()})
        if place is None:
            raise ConfigError(
                f"--model {known.model}: its memory is not known before it is downloaded; give a folder that holds it. "
                f"{registry.suggest(known.model, paths)}Known: {', '.join(paths)}"
            )
        own = {one: tree for one, tree in every.items() if config_folder(tree["model"]["path"]) == place}
        near = own[min(own, key=len)] if own else {"model": {"dtype": "bfloat16", "lora": {"rank": 32, "alpha": 64}}}
        model = near["model"] | {"path": known.model}
        part = model_component(model, offline=True)
        try:
            adapter = skeleton(part.name, part.module, part.config)
        except UnknownModel as error:
            raise ConfigError.about(error, f"--model {known.model}: ") from None
        method, self.why["algorithm"] = CHOICES["methods"][self._need(adapter)]
        shared = {one: any(r.get("name") in known.rewards for r in t.get("rewards", [])) for one, t in every.items()}
        noise = not isinstance(adapter.process, FlowProcess)

        def score(one: str) -> tuple[bool | int, ...]:
            tree, like = every[one], every[one]["model"]
            alike = is_tiny(like["path"]) == self.tiny, (like.get("name") in CHOICES["noise"]) == noise
            return *alike, tree["algorithm"]["name"] == method, one in own, shared[one], -len(one)

        base = max(every, key=score)
        tree, self.why["optim"] = {"rewards": [], "rollout": {}, "eval": {}} | copy.deepcopy(every[base]), f"as {base}"
        if base not in own:
            guided = {
                k: v for k, v in near.get("rollout", {}).items() if k in ("num_inference_steps", "guidance_scale")
            }
            tree |= {"model": model, "rollout": tree["rollout"] | guided}
        if tree["algorithm"]["name"] != method:
            tree |= {"algorithm": {"name": method}, "rollout": tree["rollout"] | {"sampler": None}}
        tree["model"] = tree["model"] | {"path": self._path(known.model)}
        other = next((one for one in every if shared[one] and not self.tiny), "")
        self._data(tree, every.get(base if shared[base] else other, {}))
        self._geometry(tree, video=adapter.num_frames > 1)
        return tree

    def _need(self, adapter: Any) -> str:
        known = self.known
        binding = {
            "pairs": known.pairs is not None,
            "noise": not isinstance(adapter.process, FlowProcess),
            "video": adapter.num_frames > 1,
            "rewards": len(known.rewards) > 1,
            "memory": not self.tiny and self.memory <= SMALL_GB * 2**30,
            "hours": known.hours is not None,
        }
        return next((need for need, binds in binding.items() if binds), "nothing")

    def _path(self, given: str) -> str:
        """A file or folder as the recipe names it; other names as they are."""
        return os.path.relpath(given, self.folder) if Path(given).exists() else given

    def _data(self, tree: dict[str, Any], shared: dict[str, Any]) -> None:
        """Prompts or pairs, and the rewards, as a recipe that shares one has it."""
        known, data, general = self.known, tree["data"], CHOICES["prompts"]
        entries = {entry.get("name"): entry for entry in shared.get("rewards", [])}
        rewards = [{"path": self._path(r)} if r.endswith(".py") else entries.get(r, {"name": r}) for r in known.rewards]
        if known.pairs is not None:
            pairs = {k: v for k, v in data.get("pairs", {}).items() if k not in ("eval", "max_eval")}
            prompts = self._path(known.prompts or data.get("eval_prompts") or general["eval_prompts"])
            tree["data"] = {"pairs": pairs | {"path": self._path(known.pairs)}, "eval_prompts": prompts}
            tree |= {"rewards": [], "eval": tree["eval"] | {"rewards": rewards or tree["eval"].get("rewards", [])}}
            self.why["data"] = "pairs.eval names held-out pairs, if there are some (docs/preferences.md)"
        elif known.prompts is not None:
            tree |= {"rewards": rewards, "data": {"prompts": self._path(known.prompts)}}
            self.why["data"] = "a tenth of the prompts is held out for evaluations"
        else:
            tree |= {"rewards": rewards, "data": data if self.tiny else shared.get("data", general)}
            self.why["data"] = "prompts of the package, since --prompts was left out"
        if not self.tiny:
            tree["data"] = tree["data"] | {"max_eval_prompts": 64}

    def _geometry(self, tree: dict[str, Any], *, video: bool) -> None:
        """Samples of an iteration for one device, and batches to begin with."""
        rollout, total = tree["rollout"], tree["data"].get("pairs", {}).get("per_iteration", 64)
        if self.known.pairs is None:
            if not self.tiny and rollout.get("group_size", 12) > 1:
                few = (4, 8) if video else (8, 12)
                rollout |= dict(zip(("prompts_per_iteration", "group_size"), few, strict=True))
                self.why["rollout.prompts_per_iteration"] = "for one device; published runs have many"
            total = rollout["prompts_per_iteration"] * rollout["group_size"]
        batch = rollout.get("batch_size", 8)
        tree |= {part: {"batch_size": batch} | tree.get(part, {}) for part in ("rollout", "optim", "eval")}
        tree["optim"]["updates_per_iteration"] = math.gcd(tree["optim"].get("updates_per_iteration", 1), total)

    def _read(self, tree: dict[str, Any]) -> Resolved:
        """A tree as `flowrl train` reads it."""
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "recipe.yaml"
            file.write_text(yaml.safe_dump(tree), encoding="utf-8")
            return resolve(load_config(file, folder=self.folder), offline=True)

    def _look(self, tree: dict[str, Any]) -> None:
        """Plan a tree as `flowrl plan` does."""
        self.tree, self.resolved = tree, self._read(tree)
        self.adapter, _ = outline(self.resolved)
        plan, data = step_plan(self.resolved, self.adapter), data_here(self.resolved)
        self.own, self.result = estimated(self.resolved, self.adapter, plan, data)
        self.needs = needed(self.resolved, self.result)

    def _adapt(self, tree: dict[str, Any]) -> None:
        """Plan a tree; options of a method that were another model's are changed as their fault says."""
        try:
            self._look(tree)
        except ConfigError as error:
            own = [each for each in error.remedies if any(key.startswith("algorithm.") for key in each.settings)]
            if not own:
                raise
            self.why |= dict.fromkeys(own[0].settings, "for this model")
            self._adapt(overridden(tree, [f"{key}={json.dumps(value)}" for key, value in own[0].settings.items()]))

    def _fit(self) -> None:
        """Take the savings that the memory asks for, round by round."""
        room = (self.memory - reward_bytes(self.resolved)) / MARGIN
        for savings in CHOICES["savings"]:
            if self.needs is None or self.needs <= self.memory:
                return
            over = {phase.name for phase in self.result.phases if (phase.peak or 0) > room}
            over |= {"resident" for phase in self.result.phases if phase.resident > room and phase.name != "encode"}
            over |= {"all" for _ in over - {"encode"}}
            tree = self.tree
            for phases, options, reason in savings:
                least = options.get("optim.batch_size", 0) < self.resolved.run.optim.batch_size
                words = [f"{key}={json.dumps(value)}" for key, value in options.items()]
                try:
                    if over & {*phases} and least:
                        changed = overridden(copy.deepcopy(tree), words)
                        self._read(changed)
                        tree, self.why = changed, self.why | dict.fromkeys(options, reason)
                except Fault:
                    continue  # the model or the method does not take it
            if tree is not self.tree:
                self._look(tree)
        if self.needs is not None and self.needs > self.memory:
            raise ConfigError(
                f"--memory {self.memory / 2**30:g}: {self.known.model} with {self.tree['algorithm']['name']} needs "
                f"{size(self.needs)} by flowrl plan, with every saving that it takes",
                remedies=[Remedy(flag=f"--memory {math.ceil(self.needs / 2**30)}")],
            )

    def _spend(self) -> None:
        """Iterations by the hours, where this model was measured on such a card."""
        tree, given = self.tree, self.known.hours
        like = [
            c for c, gib in table()["cards"].items() if c == self.device or abs(gib - self.memory / 2**30) < 0.05 * gib
        ]
        took = [seconds(card, self.resolved, self.adapter, self.result, self.own, recomputes=False) for card in like]
        whole = max((on.whole for on in took if on.whole is not None), default=None)
        said = "as there (optim); no measurement of this model on such a card: flowrl plan --measure times it on yours"
        if whole is not None:
            by = f"by the measurement on {', '.join(like)}"
            said = f"{hours(whole, tree['iterations'])} {by}, without {LEFT_OUT}"
            if given is not None:
                tree["iterations"] = int(given * 3600 * SHARE / whole)
                said = f"{SHARE:.0%} of {given:g} hours at {whole:.1f} s {by}; the rest is for {LEFT_OUT}"
                if tree["iterations"] < LEAST:
                    raise ConfigError(
                        f"--hours {given:g}: an iteration takes {whole:.1f} s {by}, so these are {tree['iterations']}, "
                        f"and fewer than {LEAST} are not worth a start",
                        remedies=[Remedy(flag=f"--hours {math.ceil(LEAST * whole / 360 / SHARE) / 10:g}")],
                    )
        self.why["iterations"] = said
        for part in ("eval", "checkpoint"):
            every = min(tree.get(part, {}).get("every", 20), max(1, tree["iterations"] // 4))
            tree[part] = tree.get(part, {}) | {"every": every}

    @property
    def about(self) -> str:
        """What it is, in a sentence."""
        wanted = "memory not known" if self.needs is None else f"{size(self.needs)} of {size(self.memory)}"
        return f"{self.tree['algorithm']['name']} on {self.known.model}: {wanted}, a margin and the rewards included"

    def __str__(self) -> str:
        """Its YAML, with a comment above what has a reason."""
        lines = [f"# {line}" for line in textwrap.wrap(f"{self.about}. Written by flowrl new config.", 116)]
        for key, value in self.tree.items():
            said = (f"{place}: {why}" for place, why in self.why.items() if place.partition(".")[0] == key)
            lines += [f"# {line}" for one in said for line in textwrap.wrap(one, 116)]
            flow = None if isinstance(value, dict) else False
            lines += yaml.safe_dump({key: value}, sort_keys=False, width=110, default_flow_style=flow).splitlines()
        return "\n".join(lines) + "\n"


def _require_sound(reward: str) -> None:
    """Refuse a reward that there is not, or that breaks a law of rewards."""
    import flowrl

    if not reward.endswith(".py"):
        return registry.require_known("rewards", reward)
    try:
        flowrl.check(reward)
    except Fault as error:
        raise ConfigError.about(error, f"--reward {reward} is refused, and no recipe is written: ") from None
