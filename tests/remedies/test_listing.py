"""The list of all places that make a remedy, against the runs that follow them."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from tests.remedies import FOLLOWED
from tests.remedies.source import FILES, ROOT, called, functions, parsed, places

for module in sorted((ROOT / "tests").rglob("test_*.py")):  # also those that follow a remedy in a test of their own
    if module != Path(__file__) and "@follows(" in module.read_text(encoding="utf-8"):
        importlib.import_module(".".join(module.relative_to(ROOT).with_suffix("").parts))

RAISED = re.compile(r"(Error|Failure|Lost)$|^(Diverged|Unfit|UnknownModel|fault|refuse|_refused|damaged|about)$")
"""Names of what carries a message, and of helpers that make one."""
# What a message says where it names something to do: an option with its value, a command with its word, a flag.
TOLD = re.compile(
    r"\b(set|use|try|give|run|train|go on|go on with|take|keep|add|or|to|leave|leave out|drop) ['`\"]?"
    r"(flowrl [a-z]|pip install|[a-z_]+(\.[a-z_0-9]+)+ ?=|--[a-z])"
    r"|\b(set|leave) (it|that|them|one) (to|out)\b|\bleave \S+ out\b|; (use|raise it|lower it|set) "
)
LEFT = {
    "the value is the user's own: a name, a file, a text, one of the listed choices": """
        apps/suites/running/judging.py:judge_of commands/new.py:write commands/score.py:command
        commands/serve.py:_token config/components.py:component apps/migration/engine.py:Draft.quotient
        apps/migration/engine.py:Draft.gpus media/mp4.py:write core/paths.py:expanded.fill
        credit/advantages.py:_normalised credit/selection.py:SelectConfig.check_group
        data/given_samples.py:Given.require_readable data/options.py:DataConfig.__post_init__
        data/stored_videos.py:Frames._facts data/stored_videos.py:Frames.require
        evaluation/previews.py:preview_prompts evaluation/previews.py:require_own evaluation/previews.py:require_learned
        apps/suites/running/exchange.py:with_results apps/suites/_reading.py:text_of apps/suites/vbench.py:compat
        models/pipelines/classes.py:_reader models/pipelines/classes.py:_download moving_shapes.py:split
        run/requests.py:_wish samplers/base.py:StepDistribution.log_prob shapes.py:split shapes.py:distance
    """,
    "another method, model or checkpoint, whose options are others": """
        diffusion/flash.py:flash_schedule models/_schedulers.py:schedule_of models/_schedulers.py:vp_grid
        data/preferences.py:PreferenceSet._fitting models/base.py:ModelAdapter.encode_images
        models/sdxl.py:TwoClips.__init__ apps/publish/export.py:export apps/publish/export.py:_family
    """,
    "a reward does not know its place in the configuration": """
        scoring/build.py:require_modality scoring/entries.py:RewardPlan.build scoring/entries.py:RewardPlan._reward
        scoring/entries.py:reward_plan scoring/entries.py:check_plans scoring/scorer.py:check_entries
        rewards/_judges/chat_api.py:HttpJudge._first_tokens rewards/_judges/vlm.py:LocalJudge.token_ids
        rewards/_remote/client.py:Client._require_room rewards/_vision/open_clips.py:_named
        rewards/_vision/optical_flow.py:load_raft.magnitude rewards/aesthetic.py:build rewards/geneval.py:_check
        rewards/hpsv2.py:find_weights rewards/questions.py:_check rewards/video_align.py:build
        rewards/votes.py:build.score
    """,
}
"""Reason -> places that tell something to do in words alone."""


def test_every_remedy_has_a_run_that_follows_it() -> None:
    known = {place for file in FILES for place in places(file).values()}
    assert known - FOLLOWED.keys() == set()
    assert FOLLOWED.keys() - known == set(), "these places make no remedy any more"


def words(call: ast.Call) -> str:
    """The text of a message, with its values as `{}`."""
    parts: list[str] = []
    for argument in call.args:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
            elif isinstance(node, ast.FormattedValue):
                parts.append("{}")
    return "".join(parts)


def told_in_words() -> set[str]:
    """Places whose message tells an option with its value, a command or a flag, and carries no remedy."""
    found: set[str] = set()
    for file in FILES:
        for name, node in functions(parsed(file)):
            if not isinstance(node, ast.Call) or not RAISED.search(called(node)):
                continue
            if not any(each.arg == "remedies" for each in node.keywords) and TOLD.search(words(node)):
                found.add(f"{file.relative_to(ROOT)}:{name}".removeprefix("flowrl/"))
    return found


def test_what_a_message_tells_to_do_is_data():
    left = {place for places in LEFT.values() for place in places.split()}
    assert told_in_words() - left == set(), "carry it as a Remedy"
    assert left - told_in_words() == set(), "these tell it in words no more"
