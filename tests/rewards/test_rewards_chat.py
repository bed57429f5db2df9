"""Judges behind a server: every way a reply can fail, against a server of the test; nothing failed is ever a 0."""

import asyncio
import dataclasses
import logging
import math
import sys
import time
from typing import Any

import pytest
import torch
from flowrl.rewards._judges import chat_api
from flowrl.rewards._judges.chat_api import Http

from flowrl.reward import RewardError
from flowrl.rewards import vlm_judge, vqa_score
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.fake_chat import FakeChat, Reply, free_port

YES = Reply(top={"Yes": math.log(0.8), "No": math.log(0.1), "the": math.log(0.01)})


@pytest.fixture(scope="module")
def running():
    server = FakeChat()
    yield server
    server.stop()


@pytest.fixture
def server(running, monkeypatch):
    monkeypatch.setattr(chat_api, "_FIRST_WAIT_S", 0.01)
    running.reset(lambda request: YES)
    return running


def judge(server, rubric: str = "alignment", url: str | None = None, **http):
    options = Http(base_url=url or server.url, model="fake", **http)
    return vlm_judge.build(vlm_judge.Config(backend="http", http=options, rubric=rubric))


def pictures(count: int = 4) -> torch.Tensor:
    return torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def scored(reward, count: int = 4, prompts: list[str] | None = None) -> Any:
    texts = prompts or [f"prompt {i}" for i in range(count)]
    return reward.score(pictures(count), texts, [{}] * count)


def axes(alignment: float) -> Reply:
    return Reply(text=f'{{"reasons": "so", "alignment": {alignment}, "coherence": 3, "style": 2.5}}')


# ---- probabilities of answers


FORMS = {"Yes": math.log(0.3), " yes": math.log(0.2), "YES": math.log(0.1), "No": math.log(0.2), "\u2581no": -9.0}


@pytest.mark.parametrize(
    ("rubric", "top", "expected"),
    [
        ("alignment", {"Yes": -1.0, "No": -1.0}, 0.5),
        # The forms of an answer are summed in probability.
        ("alignment", FORMS, 0.6 / (0.6 + 0.2 + math.exp(-9.0))),
        # An option that is not listed counts as its upper bound, the least probability that is.
        ("alignment", {"Yes": -0.1, "Maybe": -3.0, "Sure": -5.0}, 1 / (1 + math.exp(-5.0 + 0.1))),
        # The expected digit is divided by five.
        ("alignment_digits", {str(digit): -2.0 for digit in range(6)}, 0.5),
        ("alignment_digits", {"5": math.log(0.75), "4": math.log(0.25), "x": -800.0}, 4.75 / 5),
    ],
)
def test_probabilities_of_answers_become_a_score(server, rubric, top, expected):
    server.answer = lambda request: Reply(top=top)
    torch.testing.assert_close(scored(judge(server, rubric)), torch.full((4,), expected))


def test_an_answer_that_is_no_option_at_all_is_nan_and_not_one_half(server):
    server.answer = lambda request: Reply(top={"<think>": -0.1, "The": -3.0})
    reward = judge(server)
    assert scored(reward).isnan().all()
    assert reward.score.counters.values()["failures"] == 4


def test_little_probability_on_the_options_is_warned_of(server, caplog):
    server.answer = lambda request: Reply(top={"The": -0.05, "Yes": -4.0, "No": -5.0})
    reward = judge(server)
    with caplog.at_level(logging.WARNING, logger="flowrl"):
        assert scored(reward).isfinite().all()
    assert "chat template or its thinking mode is wrong" in caplog.text
    assert reward.score.counters.values()["low_mass"] == 4


def test_vqa_score_is_the_probability_of_yes_alone(server):
    server.answer = lambda request: Reply(top={"Yes": math.log(0.3), " Yes": math.log(0.1), "yes": -0.7, "No": -3.0})
    reward = vqa_score.build(vqa_score.Config(backend="http", http=Http(base_url=server.url, model="fake")))
    torch.testing.assert_close(scored(reward, 1), torch.tensor([0.4]))
    assert server.requests[0].text == 'Does this figure show "prompt 0"? Please answer Yes or No.'


def test_a_server_without_log_probabilities_stops_with_the_remedy(server):
    server.answer = lambda request: Reply(text="Yes")
    with pytest.raises(RewardError, match="gives no log-probabilities of 'fake'; use a rubric of scale 'score'"):
        scored(judge(server))


# ---- what is sent


def test_pictures_arrive_lossless_with_their_own_prompt(server):
    scored(judge(server))
    sent = {request.text.split('"')[1]: request.images[0] for request in server.requests}
    for number, image in enumerate(pictures()):
        expected = (image * 255).round().byte().permute(1, 2, 0).numpy()
        assert (sent[f"prompt {number}"] == expected).all()


def test_the_request_asks_for_one_token_with_twenty_listed(server):
    scored(judge(server), 1)
    body = server.requests[0].body
    expected = {"temperature": 0, "logprobs": True, "top_logprobs": 20, "max_completion_tokens": 1}
    assert body.items() >= (expected | {"chat_template_kwargs": {"enable_thinking": False}}).items()
    scored(judge(server, token_limit="max_tokens", disable_thinking=False, extra_body={"user": "me"}), 1)
    body = server.requests[1].body
    assert (body["max_tokens"], body["user"]) == (1, "me")
    assert not {"max_completion_tokens", "chat_template_kwargs"} & set(body)


def test_equal_questions_are_put_once_and_other_prompts_apart(server):
    image = pictures(1).expand(4, 3, 8, 8)
    reward = judge(server)
    reward.score(image, ["a", "b", "a", "a"], [{}] * 4)
    assert len(server.requests) == 2
    reward.score(torch.stack([image[0], image[0].flip(-1)]), ["a", "a"], [{}] * 2)
    assert len(server.requests) == 4


def test_the_key_is_sent_and_never_shown_and_no_other_one(server, monkeypatch, caplog):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-openai")
    monkeypatch.setenv("MY_JUDGE_KEY", "sk-secret-123")
    server.answer = lambda request: Reply(status=400, text="bad key sk-secret-123 here")
    with caplog.at_level(logging.INFO, logger="flowrl"):
        assert scored(judge(server, api_key_env="MY_JUDGE_KEY"), 1).isnan().all()
    assert server.requests[0].headers["authorization"] == "Bearer sk-secret-123"
    assert "bad key *** here" in caplog.text
    assert "sk-secret" not in caplog.text
    scored(judge(server), 1)
    assert "sk-of-openai" not in str([request.headers for request in server.requests])


def test_a_missing_key_model_or_package_is_named(server, monkeypatch):
    monkeypatch.delenv("MY_JUDGE_KEY", raising=False)
    with pytest.raises(RewardError, match=r"api_key_env='MY_JUDGE_KEY', but the environment has no such variable"):
        judge(server, api_key_env="MY_JUDGE_KEY")
    with pytest.raises(RewardError, match=r"http\.model is required"):
        vlm_judge.build(vlm_judge.Config(backend="http"))
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(RewardError, match=r"pip install 'flowrl\[vlm\]'"):
        judge(server)


# ---- order and concurrency


def test_scores_keep_their_order_when_replies_do_not(server):
    def answer(request):
        number = int(request.text.split("prompt ")[1].split('"')[0])
        return Reply(top={"Yes": -float(number), "No": -4.0}, delay_s=0.02 * (8 - number))

    server.answer = answer
    values = scored(judge(server), 8)
    torch.testing.assert_close(values, torch.sigmoid(4.0 - torch.arange(8.0)))
    backwards = judge(server).score(pictures(8).flip(0), [f"prompt {i}" for i in range(7, -1, -1)], [{}] * 8)
    torch.testing.assert_close(backwards, values.flip(0))


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_under_way_than_allowed(server, limit):
    server.answer = lambda request: Reply(top=YES.top, delay_s=0.03)
    scored(judge(server, concurrency=limit), 9)
    assert server.most_at_once == limit


def test_a_judge_works_inside_a_running_event_loop(server):
    async def inside():
        return scored(judge(server), 2)

    assert asyncio.run(inside()).isfinite().all()


# ---- failures


def test_an_error_of_the_server_is_tried_again(server):
    server.answer = lambda request: Reply(status=500, text="oops") if request.number < 2 else YES
    reward = judge(server)
    torch.testing.assert_close(scored(reward, 1), torch.tensor([0.8 / 0.9]))
    counts = reward.score.counters.values()
    assert (counts["questions"], counts["requests"], counts["retries"], counts["failures"]) == (1, 3, 2, 0)


@pytest.mark.parametrize("raw", ["{not json", '{"choices": []}', '"hello"'])
def test_a_reply_that_is_no_chat_completion_is_tried_again_then_nan(server, raw):
    server.answer = lambda request: Reply(raw=raw) if request.number == 0 else YES
    assert scored(judge(server), 1).isfinite().all()
    server.reset(lambda request: Reply(raw=raw))
    assert scored(judge(server, retries=1), 1).isnan().all()
    assert len(server.requests) == 2


def test_the_wait_a_server_asks_for_is_kept(server):
    times = []

    def answer(request):
        times.append(time.monotonic())
        return Reply(status=429, headers={"retry-after": "0.4"}) if request.number == 0 else YES

    server.answer = answer
    assert scored(judge(server), 1).isfinite().all()
    assert times[1] - times[0] >= 0.4


def test_a_wait_beyond_the_deadline_is_not_begun(server):
    server.answer = lambda request: Reply(status=429, headers={"retry-after": "60"})
    start = time.monotonic()
    assert scored(judge(server, deadline_s=30.0), 2).isnan().all()
    assert time.monotonic() - start < 30
    assert len(server.requests) == 2


def test_waits_grow_and_are_jittered_without_the_global_random_numbers(server):
    import random

    state = random.getstate()
    of = judge(server).score.judge
    waits = [[of._wait(TimeoutError(), attempt) for _ in range(50)] for attempt in range(14)]
    for attempt, drawn in enumerate(waits):
        middle = min(30.0, 0.01 * 2**attempt)
        assert len(set(drawn)) > 10
        assert all(0.5 * middle <= wait <= 1.5 * middle for wait in drawn)
    assert random.getstate() == state


@pytest.mark.parametrize(
    ("rubric", "good", "bad", "http", "requests"),
    [
        ("alignment", YES, Reply(top=YES.top, delay_s=6.0), {"timeout_s": 1.0, "retries": 0}, 3),
        # What the server refuses is not repeated.
        ("alignment", YES, Reply(status=400, text="too long"), {}, 3),
        # What cannot be used is asked for twice.
        ("quality", axes(4), Reply(text="no"), {}, 4),
    ],
    ids=["too slow", "refused", "unusable twice"],
)
def test_what_fails_for_one_sample_is_nan_for_it_alone(server, rubric, good, bad, http, requests):
    server.answer = lambda request: bad if "prompt 1" in request.text else good
    reward = judge(server, rubric, **http)
    values = scored(reward, 3)
    for each in values.values() if rubric == "quality" else [values]:
        assert each.isnan().tolist() == [False, True, False]
    assert len(server.requests) == requests
    assert reward.score.counters.values()["failures"] == 1


def test_a_dead_server_is_nan_everywhere_and_the_scorer_stops(server, monkeypatch):
    reward = judge(server, url=f"http://127.0.0.1:{free_port()}/v1", retries=1)
    assert scored(reward).isnan().all()
    assert reward.score.counters.values()["failures"] == 4
    with pytest.raises(RewardError, match="4 of 4 samples could not be scored"):
        Scorer([WeightedReward("judge", reward)]).score(pictures(), ["a", "b", "c", "d"], [{}] * 4)


def test_a_dead_server_is_tried_at_length_once_and_found_again(server):
    """Else a run would wait out every question's retries before it stops."""
    reward = judge(server, url=f"http://127.0.0.1:{free_port()}/v1", retries=2, concurrency=1)
    assert scored(reward).isnan().all()
    assert reward.score.counters.values()["requests"] == 3 + 1 + 1 + 1
    behind = reward.score.judge
    behind.config = dataclasses.replace(behind.config, base_url=server.url)
    assert scored(reward).isfinite().all()
    server.answer = lambda request: Reply(status=503) if request.number < 6 else YES
    assert scored(reward).isfinite().all(), "retries are back"


@pytest.mark.parametrize(("status", "remedy"), [(401, "check the API key"), (404, "check base_url and model")])
def test_a_wrong_key_or_model_stops_the_run_and_says_what_to_check(server, status, remedy):
    server.answer = lambda request: Reply(status=status)
    with pytest.raises(RewardError, match=f"answers {status}; {remedy}"):
        scored(judge(server))


# ---- JSON answers


def test_axes_are_weighted_and_reported(server):
    server.answer = lambda request: axes(5)
    reward = judge(server, "quality")
    values = scored(reward, 2)
    assert tuple(values) == reward.card.outputs
    torch.testing.assert_close(values["vlm_judge"], torch.full((2,), (2 * 5 + 3 + 2.5) / 4))
    assert values["vlm_judge_alignment"].tolist() == [5, 5]
    assert values["vlm_judge_style"].tolist() == [2.5, 2.5]


def test_the_form_of_the_answer_is_demanded_as_far_as_the_server_can(server):
    server.answer = lambda request: axes(5)
    for structured in ("json_schema", "json_object", "none"):
        scored(judge(server, "quality", structured=structured), 1)
    forms = [request.body.get("response_format") for request in server.requests]
    schema = forms[0]["json_schema"]["schema"]
    assert schema["required"] == ["reasons", "alignment", "coherence", "style"]
    assert schema["additionalProperties"] is False
    assert (schema["properties"]["style"]["minimum"], schema["properties"]["style"]["maximum"]) == (1, 5)
    assert forms[1:] == [{"type": "json_object"}, None]


BAD = {
    "no object": "I would say 4.",
    "cut off": '{"reasons": "so", "alignment": 4',
    "an axis is missing": '{"reasons": "so", "alignment": 4, "coherence": 3}',
    "out of range": '{"reasons": "so", "alignment": 7, "coherence": 3, "style": 3}',
    "a word": '{"reasons": "so", "alignment": "4", "coherence": 3, "style": 3}',
    "nan": '{"reasons": "so", "alignment": NaN, "coherence": 3, "style": 3}',
    "a further key": '{"reasons": "so", "alignment": 4, "coherence": 3, "style": 3, "total": 3}',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_an_unusable_answer_is_asked_for_once_more_with_the_error(server, bad):
    server.answer = lambda request: Reply(text=bad) if len(request.body["messages"]) == 1 else axes(4)
    reward = judge(server, "quality")
    assert scored(reward, 1)["vlm_judge_alignment"].tolist() == [4]
    _, answer, complaint = server.requests[1].body["messages"]
    assert answer == {"role": "assistant", "content": bad}
    assert complaint["role"] == "user"
    assert "That answer cannot be used" in complaint["content"]
    counts = reward.score.counters.values()
    assert (counts["reasks"], counts["failures"], counts["requests"]) == (1, 0, 2)


def test_text_around_the_object_is_passed_over(server):
    server.answer = lambda request: Reply(text=f"Here:\n```json\n{axes(4).text}\n```")
    assert scored(judge(server, "quality"), 1)["vlm_judge_alignment"].tolist() == [4]
    assert len(server.requests) == 1


# ---- counters


def test_tokens_and_cost_are_counted_and_logged(server, caplog):
    reward = judge(server, price_prompt=2.0, price_completion=10.0)
    with caplog.at_level(logging.INFO, logger="flowrl"):
        scored(reward, 3)
    counts = reward.score.counters.values()
    assert (counts["prompt_tokens"], counts["completion_tokens"]) == (300, 21)
    assert reward.score.counters.cost == pytest.approx((300 * 2 + 21 * 10) / 1e6)
    assert "reward vlm_judge so far: 3 questions, 3 requests" in caplog.text
    assert "cost 0.0008" in caplog.text
