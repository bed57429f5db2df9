"""Remedies of runs, data and benchmark suites, given by one function."""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from flowrl.core.errors import ModelError, Remedy
from tests.remedies import follows
from tests.remedies.following import each_ends, loaded, numbered, recipe, require_package, stand_in, words_of


def get(remedy: Remedy, key: str, given: Any) -> Any:
    """The value of an option that a remedy sets, else the given one."""
    return remedy.settings.get(key, given)


def number_of(remedy: Remedy, flag: str, given: int) -> int:
    """The number after a flag that a remedy gives, else the given one."""
    words = remedy.flag.split()
    assert words[:1] in ([], [flag])
    return int(words[1]) if words else given


def ended_by_its_guard(remedy: Remedy) -> None:
    from flowrl.config.schema import GuardConfig
    from flowrl.run.guarding import GUARDED, SUMMARY, refuse_guarded

    Path(SUMMARY).write_text(json.dumps({"status": GUARDED}))
    refuse_guarded(Path(), GuardConfig(mode=get(remedy, "guard.mode", "stop")))


def few_prompts(remedy: Remedy) -> None:
    from flowrl.config.schema import GuardConfig
    from flowrl.run import guarding

    guard = GuardConfig(mode=get(remedy, "guard.mode", "warn"))
    scorers = stand_in(trained=None, watched=stand_in(entries=["jpeg"], distinct=[]))
    config = stand_in(eval=stand_in(every=5))
    session = stand_in(config=config, parts=stand_in(scorers=scorers))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guarding, "_scored", lambda entry: entry)
        patch.setattr(guarding, "require_watched", lambda *given: None)
        patch.setattr(guarding, "watched_outputs", lambda *given: ["jpeg"])
        guarding.Guarding._chosen(stand_in(session=session, options=guard, _prompts=[]))


def judged(remedy: Remedy, option: str, target: str, value: object) -> None:
    """`load` with an option that has no meaning for its target."""
    from flowrl.run import judged

    given: dict[str, Any] = {} if remedy.without == f"--{option}" else {option: value}
    with suppress(*([ModelError] if remedy.without else [])):  # it is no model, which is found later
        judged.load(target, **given)


def made_pairs(remedy: Remedy, *words: str) -> None:
    from flowrl.apps.pairs.plan import Wanted, check
    from flowrl.config.load import load_config, resolve

    file = Path("recipe.yaml")
    file.write_text(json.dumps(recipe("flow_grpo")))
    resolved = resolve(load_config(file, ["rollout.shared_noise=false", *words, *words_of(remedy)]))
    check(resolved, Wanted(per_prompt=2, margin=0.0, count=None))


def asked_people(remedy: Remedy) -> None:
    from flowrl.run.people.asking import People

    Path("config.yaml").write_text("")
    people = stand_in(name="votes", reward=stand_in(card=stand_in(by_people=True)))
    world = stand_in(size=4, main=False, rank=0)
    slots = get(remedy, "rollout.prompts_per_iteration", 2)
    People.of(stand_in(entries=[people]), Path(), world, stand_in(), slots)


def whole_groups(remedy: Remedy, members: tuple[str, ...], key: str) -> None:
    from flowrl.run.assembly.learner import require_whole_groups

    method = stand_in(unit="group", members=members)
    require_whole_groups(method, get(remedy, key, 2), stand_in(size=4))


def unbounded(remedy: Remedy) -> None:
    """`assemble` of a rule with virtual best samples."""
    from flowrl.run.assembly.rewards import Scorers

    entry = stand_in(name="mine", weight=1.0, highest=lambda: float("inf"))
    if get(remedy, "algorithm.advantages.virtual_best", 1):
        Scorers(stand_in(entries=[entry]), None).highest()


def few_anchor_images(remedy: Remedy) -> None:
    from flowrl.algorithms import sft
    from flowrl.run.anchoring import Anchor
    from flowrl.training.base import UpdateContext
    from flowrl.training.options import OptimConfig

    method, count, world = sft.build(sft.Config()), get(remedy, "data.anchor.per_update", 2), stand_in(size=4)
    rest = {"networks": None, "rollout_batch_size": 1, "seed": 0, "counter": None, "schedule": None}
    context = UpdateContext(method=method, optim=OptimConfig(updates_per_iteration=1), world=world, **rest)
    images = stand_in(method=method, options=stand_in(per_iteration=count), seed=0)
    config = stand_in(data=stand_in(anchor=stand_in(per_update=count, coef=1.0)))
    learner, data = stand_in(context=context, optimizer=None), stand_in(anchor=images)
    parts = {"data": data, "resolved": stand_in(run=config), "learner": learner, "sampling": stand_in(world=world)}
    Anchor(stand_in(**parts), stand_in())


def taken_port(remedy: Remedy) -> None:
    from flowrl.apps.gallery.local import _bound

    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        _bound(None if remedy.without == "--port" else other.getsockname()[1]).close()


def folder_of_texts(remedy: Remedy) -> None:
    from flowrl.data.text_files import text_folder

    data = stand_in(text_cache=get(remedy, "data.text_cache", "kept"), caches_text=True)
    text_folder(data, "runs", None, images=False)


def without_package(remedy: Remedy, module: str, missing: str, act: Callable[[], object]) -> None:
    """An action that needs a package, which the extra of the remedy brings."""
    if remedy.command:
        return require_package(remedy, missing)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module, None)
        act()


def no_datasets() -> None:
    from flowrl.data.prompt_sources import load_prompts

    load_prompts("hf:nobody/nothing", "data.prompts")


def no_openai() -> None:
    from flowrl.rewards._judges.chat_api import Http, load

    load(Http(base_url="http://localhost:1", model="a"), "vlm_judge")


def no_httpx() -> None:
    from flowrl.rewards._remote.client import _http_client

    _http_client(stand_in())


def no_httpx_for_a_detector() -> None:
    from flowrl.rewards._detection.remote import RemoteDetector

    RemoteDetector("http://localhost:1")


def own_prompts(remedy: Remedy) -> None:
    from flowrl.evaluation.suite import refuse_path

    refuse_path(None if remedy.without == "--prompts" else Path("a.txt"), "geneval")


def exported(remedy: Remedy) -> None:
    from flowrl.apps.suites.running.exchange import export

    if remedy.without == "--export":
        return
    export(stand_in(suite=stand_in(name="drawbench", layout=None)), stand_in(), Path("x"))


def squared(remedy: Remedy) -> None:
    from flowrl.apps.suites.running.exchange import _grid

    count = number_of(remedy, "--samples", 3)
    folder = stand_in(read=lambda *sample: torch.zeros(3, 8, 8))
    _grid(folder, stand_in(samples=[("0", k) for k in range(count)]).samples, Path("sheet.png"))


def named(remedy: Remedy, suite: str) -> None:
    from flowrl.core import registry

    module = registry.importlib.import_module(f"flowrl.apps.suites.{suite}")
    for k in range(number_of(remedy, "--samples", 11)):
        module.layout(stand_in(id="color-0", text="a red circle"), k)


def other_judge(remedy: Remedy) -> None:
    from flowrl.apps.suites.running import pairs

    header = stand_in(header={"made_with": {}})
    row = pairs.PairRow("0", 0, "a", 1.0, 0.0, 1.0, 0.0, judge="another")
    Path(pairs.FILE).write_text(json.dumps(dataclasses.asdict(row)))
    task = stand_in(all=lambda: [], items=[], batch_size=1, samples=1)
    folders = {"base": header, "model": header}
    pairs.compare_folders(task, folders, stand_in(facts={}), Path(), rejudge=remedy.flag == "--rejudge")


def cached_texts(remedy: Remedy) -> None:
    loaded(Path(), recipe("flow_grpo"), ["data.cache_text=false", "data.text_cache=kept", *words_of(remedy)])


def judged_captions(remedy: Remedy) -> None:
    from flowrl.data.prompts import Prompt
    from flowrl.reward import Card
    from flowrl.run import best_guidance

    plan = stand_in(by_people=False, name="mine", module=stand_in())
    entry = stand_in(reward=stand_in(card=Card(outputs=("mine",), requires=("answer",))))
    session = stand_in(
        parts=stand_in(scorers=stand_in(watched=stand_in(entries=[entry]))),
        resolved=stand_in(rewards=[plan], eval_rewards=[]),
    )
    if get(remedy, "eval.best_guidance", [2.0]):  # else nothing is searched for
        best_guidance._require_judged(session, entry, [Prompt("a caption")], "captions of data.pairs")


AWM = "algorithm={name: awm, times: {name: uniform, count: 2}}"
CASES: list[tuple[str, Callable[[Remedy], object]]] = [
    ("run/guarding.py:refuse_guarded 1 2", ended_by_its_guard),
    ("run/guarding.py:Guarding._chosen", few_prompts),
    ("run/best_guidance.py:_require_judged", judged_captions),
    ("run/judged.py:load 1", lambda remedy: judged(remedy, "base", "owner/model", True)),
    ("run/judged.py:load 2", lambda remedy: judged(remedy, "config", "owner/model", "other/model")),
    ("run/judged.py:load 3", lambda remedy: judged(remedy, "revision", ".", "main")),
    ("apps/pairs/plan.py:check 1", lambda remedy: made_pairs(remedy, AWM, "rollout.sampler=null",
                                                            "rollout.exploration.pool=64")),
    ("apps/pairs/plan.py:check 2", lambda remedy: made_pairs(remedy, "rollout.shared_noise=true",
                                                            "rollout.sampler=null")),
    ("apps/pairs/plan.py:check 3", lambda remedy: made_pairs(remedy, "model.shard=true")),
    ("run/people/asking.py:People.of", asked_people),
    ("run/assembly/learner.py:require_whole_groups",
     lambda remedy: whole_groups(remedy, (), "rollout.prompts_per_iteration")),
    ("run/assembly/learner.py:require_whole_groups",
     lambda remedy: whole_groups(remedy, ("a",), "data.pairs.per_iteration")),
    ("run/assembly/rewards.py:Scorers.highest", unbounded),
    ("run/anchoring.py:Anchor.__init__", few_anchor_images),
    ("apps/gallery/local.py:_bound", taken_port),
    ("data/text_files.py:text_folder", folder_of_texts),
    ("data/options.py:DataConfig.__post_init__ 1 2", cached_texts),
    ("data/prompt_files.py:missing_package",
     lambda remedy: without_package(remedy, "datasets", "datasets", no_datasets)),
    ("rewards/_judges/chat_api.py:load", lambda remedy: without_package(remedy, "openai", "openai", no_openai)),
    ("rewards/_remote/client.py:_http_client", lambda remedy: without_package(remedy, "httpx", "httpx", no_httpx)),
    ("rewards/_detection/remote.py:RemoteDetector.__post_init__",
     lambda remedy: without_package(remedy, "httpx", "httpx", no_httpx_for_a_detector)),
    ("evaluation/suite.py:refuse_path", own_prompts),
    ("apps/suites/running/exchange.py:export", exported),
    ("apps/suites/running/exchange.py:_grid 1 2", squared),
    ("apps/suites/_reading.py:one_image", lambda remedy: named(remedy, "wise")),
    ("apps/suites/t2i_compbench.py:layout", lambda remedy: named(remedy, "t2i_compbench")),
    ("apps/suites/running/pairs.py:compare_folders", other_judge),
]  # fmt: skip


@pytest.mark.parametrize(("place", "act"), CASES, ids=[place for place, _ in CASES])
@follows(*dict.fromkeys(place for case in CASES for place in numbered(case[0])))
def test_a_function_does_its_work_with_each_remedy(place, act, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    each_ends(act, place)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "device", "size", "words"),
    [("rollout", "cpu", 2, []), ("evaluation", "cuda", 1, []), ("update", "cuda", 1, []),
     ("update", "cpu", 1, ["model.lora={}"]), ("text", "cuda", 1, [])],
)  # fmt: skip
@follows(*(f"flowrl/planning/out_of_memory.py:_remedies{number}" for number in ("", *(f"#{n}" for n in range(2, 10)))))
@follows("flowrl/planning/out_of_memory.py:_batch")
def test_what_lowers_the_memory_of_a_phase_is_valid_and_does_not_raise_it(
    phase, device, size, words, tmp_path, monkeypatch
):
    from flowrl.config.load import load_config, resolve
    from flowrl.core.errors import OutOfMemory
    from flowrl.planning import out_of_memory
    from flowrl.training.world import World

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(out_of_memory, "_peak", lambda device: "Peak")
    file, name = Path("recipe.yaml"), "encode" if phase == "text" else phase
    file.write_text(json.dumps(recipe("flow_grpo")))

    def peak(*words: str) -> Any:
        resolved = resolve(load_config(file, list(words)))
        return next(each.peak for each in out_of_memory.planned(resolved, 1).phases if each.name == name)

    before, resolved = peak(*words), resolve(load_config(file, words))
    fault = out_of_memory.explained(OutOfMemory("no more", [phase]), resolved, World(0, size, torch.device(device)))
    assert isinstance(fault, OutOfMemory)
    assert fault.remedies
    for remedy in fault.remedies:
        assert str(remedy) in str(fault)
        loaded(Path(), recipe("flow_grpo"), [*words, *words_of(remedy)], deep=True)
        after = peak(*words, *words_of(remedy))
        assert after <= before, remedy
        assert after < before or "batch_size" not in str(remedy), remedy
        assert device == "cuda" or "group_offload" not in str(remedy)  # it is refused on the CPU
