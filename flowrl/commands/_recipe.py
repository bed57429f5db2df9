"""A recipe from what a person knows, with the reasons as comments: `flowrl new config`."""

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

import flowrl
from flowrl.commands._listed import recipe_tree
from flowrl.commands._plan_answer import here, hours, needed
from flowrl.commands._plan_data import data_here
from flowrl.commands._plan_hours import LEFT_OUT, TABLE, seconds
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

CHOICES = load_tree(Path(__file__).parent / "starting" / "choices.yaml")
ORDER = ("name", "iterations", "model", "data", "rewards", "algorithm", "rollout", "optim", "eval", "checkpoint")
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
        """Ask at a terminal for what is left out, where an empty line leaves it out; refuse what is missing then."""
        for key, question in CHOICES["questions"].items() if sys.stdin.isatty() else ():
            settled = self.rewards or self.pairs if key in ("rewards", "pairs") else asdict(self)[key]
            if not settled and (said := input(f"{question}: ").strip()):
                try:
                    setattr(self, key, {"rewards": str.split, "memory": float, "hours": float}.get(key, str)(said))
                except ValueError:
                    raise ConfigError(f"{key}={said!r} must be a number") from None
        needs = {"--model tiny-sd3": self.model, "--reward shapes": self.rewards or self.pairs}
        if missing := " ".join(flag for flag, value in needs.items() if not value):
            raise ConfigError("a recipe needs --model, and --reward or --pairs", Remedy(flag=missing))


def _tiny(tree: dict[str, Any]) -> bool:
    return assets.asset_folder(tree["model"]["path"], "model_index.json") is not None


class Draft:
    """A recipe that will lie in `folder`, planned; its text is `str`.

    Raises ConfigError: a reward, model, prompts or pairs that cannot be used, or a memory or time that nothing fits.
    """

    def __init__(self, name: str, known: Known, folder: Path) -> None:
        self.known, self.folder, self.why = known, folder.resolve(), dict[str, str]()
        self.device, self.memory = here() if known.memory is None else ("", int(known.memory * 2**30))
        for reward in known.rewards:
            if not reward.endswith(".py"):
                registry.require_known("rewards", reward)
                continue
            try:
                flowrl.check(reward)
            except Fault as error:
                raise ConfigError.about(error, f"--reward {reward} is refused, and no recipe is written: ") from None
        chosen = self._chosen() | {"name": name}
        self._plan({key: chosen[key] for key in (*ORDER, *sorted(chosen.keys() - {*ORDER}))}, adapt=True)
        self._fit()
        self._spend()

    def _chosen(self) -> dict[str, Any]:
        """The recipe with this method and model, or with the method, changed to what is asked for."""
        known, every = self.known, {one: recipe_tree(one) for one in assets.recipes()}
        place, paths = config_folder(str(known.model)), sorted({tree["model"]["path"] for tree in every.values()})
        own = sorted((one for one in every if config_folder(every[one]["model"]["path"]) == place), key=len)
        near = (
            every[own[0]] if own else {"model": {"dtype": "bfloat16", "lora": {"rank": 32, "alpha": 64}}, "rollout": {}}
        )
        model = near["model"] | {"path": known.model}
        try:
            part = model_component(model, offline=True)
            adapter = skeleton(part.name, part.module, part.config)
        except (UnknownModel, Fault) as error:
            meant = f"; {registry.suggest(str(known.model), paths)}known are {', '.join(paths)}"
            raise ConfigError.about(error, f"--model {known.model}: ", meant) from None
        tiny, noise, video = (
            _tiny({"model": model}),
            not isinstance(adapter.process, FlowProcess),
            adapter.num_frames > 1,
        )
        needs = {"pairs": known.pairs, "noise": noise, "video": video, "rewards": len(known.rewards) > 1}
        needs |= {"memory": not tiny and self.memory <= SMALL_GB * 2**30, "hours": known.hours, "nothing": True}
        method, self.why["algorithm"] = CHOICES["methods"][next(need for need, binds in needs.items() if binds)]
        shared = {one: any(r.get("name") in known.rewards for r in t.get("rewards", [])) for one, t in every.items()}

        def score(one: str) -> tuple[bool | int, ...]:
            tree = every[one]
            alike = _tiny(tree) == tiny, (tree["model"].get("name") in CHOICES["noise"]) == noise
            name = tree["algorithm"]["name"]
            return *alike, name == method, one in own, name == CHOICES["methods"]["nothing"][0], shared[one], -len(one)

        base = max(every, key=score)
        tree, self.why["optim"] = (
            {"rollout": {}, "eval": {}, "checkpoint": {}} | copy.deepcopy(every[base]),
            f"as {base}",
        )
        if base not in own:
            alike = {
                key: near["rollout"][key] for key in near["rollout"] if key in ("num_inference_steps", "guidance_scale")
            }
            tree |= {"model": model, "rollout": tree["rollout"] | alike}
        if tree["algorithm"]["name"] != method:
            others = (
                "sampler",
                "shared_noise",
                "exploration",
                *(("prompts_per_iteration", "group_size") * bool(known.pairs)),
            )
            rollout = {key: value for key, value in tree["rollout"].items() if key not in others}
            tree |= {"algorithm": {"name": method}, "rollout": rollout}
        tree["model"] = tree["model"] | {"path": self._path(str(known.model))}
        other = base if shared[base] else "" if tiny else next((one for one in every if shared[one]), "")
        self._fill(tree, every.get(other, {"data": tree["data"] if tiny else CHOICES["prompts"], "rewards": []}))
        self._size(tree, tiny=tiny, video=video)
        return tree

    def _path(self, given: str) -> str:
        """A file or folder as the recipe names it; other names as they are."""
        return os.path.relpath(given, self.folder) if Path(given).exists() else given

    def _fill(self, tree: dict[str, Any], shared: dict[str, Any]) -> None:
        """Prompts or pairs, and the rewards as a recipe has them that shares one."""
        known, data, entries = self.known, tree["data"], {entry.get("name"): entry for entry in shared["rewards"]}
        rewards = [{"path": self._path(r)} if r.endswith(".py") else entries.get(r, {"name": r}) for r in known.rewards]
        tree["rewards"] = [] if known.pairs else rewards
        if known.pairs:
            pairs = {key: value for key, value in data.get("pairs", {}).items() if key not in ("eval", "max_eval")}
            prompts = self._path(known.prompts or data.get("eval_prompts") or CHOICES["prompts"]["eval_prompts"])
            tree["data"] = {"pairs": pairs | {"path": self._path(known.pairs)}, "eval_prompts": prompts}
            tree["eval"] |= {"rewards": rewards or tree["eval"].get("rewards", [])}
            self.why["data"] = "pairs.eval names held-out pairs, if there are some (docs/preferences.md)"
        elif known.prompts:
            tree["data"] = {"prompts": self._path(known.prompts)}
            self.why["data"] = "a tenth of the prompts is held out for evaluations"
        else:
            tree["data"], self.why["data"] = shared["data"], "prompts of the package, since --prompts was left out"

    def _size(self, tree: dict[str, Any], *, tiny: bool, video: bool) -> None:
        """Samples of an iteration for one device, and batches to begin with."""
        known = self.known
        if not tiny:
            tree["data"] = tree["data"] | {"max_eval_prompts": 64}
            if not known.pairs and tree["rollout"].get("group_size", 12) > 1:
                tree["rollout"] |= CHOICES["video samples" if video else "samples"]
                self.why["rollout.prompts_per_iteration"] = "for one device; published runs have many"
        rollout, batch = tree["rollout"], tree["rollout"].get("batch_size", 8)
        tree |= {part: {"batch_size": batch} | tree.get(part, {}) for part in ("rollout", "optim", "eval")}
        total = tree["data"]["pairs"].get("per_iteration", 64) if known.pairs else (
            rollout["prompts_per_iteration"] * rollout["group_size"])  # fmt: skip
        tree["optim"]["updates_per_iteration"] = math.gcd(tree["optim"].get("updates_per_iteration", 1), total)

    def _read(self, tree: dict[str, Any]) -> Resolved:
        """A tree as `flowrl train` reads it."""
        with tempfile.TemporaryDirectory() as place:
            file = Path(place) / "recipe.yaml"
            file.write_text(yaml.safe_dump(tree), encoding="utf-8")
            return resolve(load_config(file, folder=self.folder), offline=True)

    def _plan(self, tree: dict[str, Any], *, adapt: bool = False) -> None:
        """Plan a tree as `flowrl plan` does; `adapt`: options of a method that were another model's change."""
        try:
            self.tree, self.resolved = tree, self._read(tree)
            self.adapter, _ = outline(self.resolved)
            plan, data = step_plan(self.resolved, self.adapter), data_here(self.resolved)
        except ConfigError as error:
            words = next((str(one) for one in error.remedies if str(one).startswith("algorithm.")), "")
            if not adapt or not words or " " in words:
                raise
            self.why[words.partition("=")[0]] = "for this model"
            return self._plan(overridden(tree, [words]), adapt=True)
        self.own, self.result = estimated(self.resolved, self.adapter, plan, data)
        self.needs = needed(self.resolved, self.result)

    def _fit(self) -> None:
        """Take the savings that the memory asks for, round by round."""
        for savings in CHOICES["savings"]:
            if self.needs is None or self.needs <= self.memory or self.result.peak is None:
                return
            room = (self.memory - self.needs) / MARGIN + (self.result.peak.peak or 0)
            over = {phase.name for phase in self.result.phases if (phase.peak or 0) > room}
            over |= {"resident" for phase in self.result.phases if phase.resident > room and phase.name != "encode"}
            over, tree = over | {"all" for _ in over - {"encode"}}, self.tree
            for phases, options, reason in savings:
                if over & {*phases} and options.get("optim.batch_size", 0) < self.resolved.run.optim.batch_size:
                    changed = copy.deepcopy(tree)
                    try:
                        self._read(
                            overridden(changed, [f"{key}={json.dumps(value)}" for key, value in options.items()])
                        )
                    except Fault:
                        continue  # the model or the method does not take it
                    tree, self.why = changed, self.why | dict.fromkeys(options, reason)
            if tree is not self.tree:
                self._plan(tree)
        if self.needs is not None and self.needs > self.memory:
            raise ConfigError(
                f"--memory {self.memory / 2**30:g}: {self.known.model} with {self.tree['algorithm']['name']} needs "
                f"{size(self.needs)} by flowrl plan, with every saving that it takes",
                Remedy(flag=f"--memory {math.ceil(self.needs / 2**30)}"),
            )

    def _spend(self) -> None:
        """Iterations by the hours, where this model was measured on such a card."""
        tree, given, gib = self.tree, self.known.hours, self.memory / 2**30
        like = [card for card, has in TABLE["cards"].items() if card == self.device or abs(has - gib) < 0.05 * has]
        took = [seconds(card, self.resolved, self.adapter, self.result, self.own) for card in like]
        whole = max((one[0] + one[1] for one in took if one is not None and one[1] is not None), default=None)
        said = "as there (optim); no measurement of this model on such a card: flowrl plan --measure times it on yours"
        if whole is not None:
            tree["iterations"] = int(given * 3600 * SHARE / whole) if given else tree["iterations"]
            said = f"{hours(whole, tree['iterations'])} on {', '.join(like)}, without {LEFT_OUT}"
            if given and tree["iterations"] < LEAST:
                least = math.ceil(LEAST * whole / 360 / SHARE) / 10
                raise ConfigError(f"--hours {given:g}: {said}; fewer than {LEAST} iterations are not worth a start",
                                  Remedy(flag=f"--hours {least:g}"))  # fmt: skip
        self.why["iterations"] = said
        for part in ("eval", "checkpoint"):
            tree[part] |= {"every": min(tree[part].get("every", 20), max(1, tree["iterations"] // 4))}

    def __str__(self) -> str:
        """Its YAML, with a comment above what has a reason."""
        wanted = "memory not known" if self.needs is None else f"{size(self.needs)} of {size(self.memory)}"
        lines = [f"# {self.known.model}: {wanted}, a margin and the rewards included. Written by flowrl new config."]
        for key, value in self.tree.items():
            said = (f"{place}: {why}" for place, why in self.why.items() if place.partition(".")[0] == key)
            lines += [f"# {line}" for one in said for line in textwrap.wrap(one, 116)]
            flow = None if isinstance(value, dict) else False
            lines += yaml.safe_dump({key: value}, sort_keys=False, width=110, default_flow_style=flow).splitlines()
        return "\n".join(lines) + "\n"
