"""The client of reward servers: what belongs together stays together, and nothing that fails becomes a number."""

import dataclasses
import json
import math
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flowrl.rewards._remote.servers import Server, Servers
from PIL import Image
from torch.testing import assert_close

from flowrl.core.errors import RewardFailure
from flowrl.core.wire import WireError, WireImage, read_image, write_image
from flowrl.media.transport import pack, unpack
from flowrl.reward import Card, RewardError
from flowrl.rewards import remote
from flowrl.run.launch import free_port
from flowrl.scoring.scorer import Scorer
from flowrl.scoring.weighted import WeightedReward
from tests.serving import Inline, brightness, pictures, results, scripted, serving


def client(*servers: str, **options: Any) -> Any:
    options = {"deadline_s": 20.0, "timeout_s": 5.0, "start_s": 0.1} | options
    return remote.build(remote.Config(servers=list(servers), reward="mine", **options))


def ask(reward, count: int, metadata=None):
    """Scores of the first `count` pictures, and those of `brightness` in this process."""
    prompts, metadata = [str(k) for k in range(count)], metadata or [{"k": k} for k in range(count)]
    found = reward.score(pictures(count), prompts, metadata)["mine"]
    return found, brightness(pictures(count), prompts, metadata)


def agrees(reward, count: int) -> None:
    """Scores of `count` pictures are those of `brightness` in this process."""
    found, expected = ask(reward, count)
    assert found.tolist() == expected.tolist()


def number(item) -> float:
    """What `brightness` gives, from the message alone."""
    picture = unpack(read_image(item["image"], "image"))
    return round(255 * float(picture.mean())) + 256 * int(item["prompt"]) + 65536 * item["metadata"].get("k", 0)


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


# ---- pictures on their way


@pytest.mark.parametrize("shape", [(3, 4, 7), (2, 3, 4, 7)])
@pytest.mark.parametrize("kind", ["png", "uint8", "float32"])
def test_pictures_and_clips_arrive_as_they_were_sent(kind, shape):
    sample = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    found = unpack(read_image(json.loads(json.dumps(write_image(pack(sample, kind)))), "x"))
    if kind == "float32":
        assert torch.equal(found, sample)
    else:
        assert torch.equal((255 * found).round(), (255 * sample).round())
        assert_close(found, sample, atol=0.5 / 255 + 1e-6, rtol=0)


def test_a_picture_with_nan_keeps_it_in_every_encoding():
    sample = pictures(2)[1].clone()
    sample[0, 2, 3] = math.nan
    for kind in ("png", "uint8", "float32"):
        found = unpack(pack(sample, kind))
        assert found.isnan().nonzero().tolist() == [[0, 2, 3]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"shape": [3, 7, 4]}, "the PNG is 4 x 7, which is not the shape"),
        ({"shape": [1, 4, 7]}, r"must be \[3, H, W\]"),
        ({"shape": [3, 4, True]}, r"must be \[3, H, W\]"),
        ({"data": "AAAA"}, "shorter than its header"),
        ({"data": "no base64!"}, "not base64"),
        ({"format": "jpeg"}, "format must be one of png, uint8, float32"),
        ({"format": "uint8"}, "bytes are not"),
        ({"path": "/etc/passwd"}, "must be an object with format, data and shape"),
    ],
)
def test_a_picture_of_another_form_is_refused_by_its_header(change, text):
    record = write_image(pack(torch.zeros(3, 4, 7), "png")) | change
    with pytest.raises(WireError, match=text):
        read_image(record, "x")


def test_a_png_of_another_kind_is_refused_and_one_without_a_shape_says_it_itself(tmp_path: Path):
    Image.new("RGBA", (5, 4)).save(tmp_path / "a.png")
    Image.new("RGB", (5, 4)).save(tmp_path / "b.png")
    records = [write_image(WireImage("png", (3, 4, 5), (tmp_path / f"{n}.png").read_bytes())) for n in "ab"]
    with pytest.raises(WireError, match="without alpha"):
        read_image(records[0], "x")
    del records[1]["shape"]
    assert read_image(records[1], "x").shape == (3, 4, 5)


# ---- order and chunks


def test_130_samples_in_chunks_of_64_come_back_in_order_each_with_its_own_prompt_and_metadata():
    runner = Inline()
    with serving(runner) as url:
        reward = client(url, max_items=64)
        found, expected = ask(reward, 130)
        assert reward.score(pictures(0), [], [])["mine"].shape == (0,)
    assert found.tolist() == expected.tolist()
    assert sorted(runner.batches) == [2, 64, 64]


def test_answers_that_are_out_of_order_are_put_in_order():
    def answer(asked):
        reply = results(asked, number)
        # The later a request was cut, the sooner it is answered, and its rows come backwards.
        time.sleep(0.1 if asked["items"][0]["id"] == "0" else 0.0)
        return 200, reply | {"results": reply["results"][::-1]}

    with scripted(answer) as url:
        agrees(client(url, max_items=4), 10)


def test_chunks_keep_to_the_limits_of_bytes_and_pixels_too():
    sizes: list[int] = []

    def answer(asked):
        sizes.append(len(asked["items"]))
        return 200, results(asked, number)

    with scripted(answer) as url:
        reward = client(url, max_megabytes=0.01)  # a picture is 108 bytes, its item is counted as about 1.2 kB
        agrees(reward, 20)
    assert max(sizes) < 9
    assert sum(sizes) == 20


def test_pictures_that_are_not_finite_are_counted_with_the_bytes_that_they_take():
    lengths: list[int] = []

    def answer(asked):
        lengths.append(len(json.dumps(asked)))
        return 200, results(asked, lambda item: None)

    with scripted(answer) as url:
        reward = client(url, max_megabytes=0.1)
        reward.score(torch.full((24, 3, 32, 32), math.nan), ["0"] * 24, [{}] * 24)
    assert sum(lengths) > 24 * 3 * 32 * 32 * 4
    assert max(lengths) <= 100_000


def test_a_cache_tells_apart_what_the_servers_compute():
    cards = []
    for served in (Card(outputs=("mine",)), Card(outputs=("mine",), source="another")):
        with serving(Inline(card=served)) as url:
            cards.append(client(url).card)
    assert cards[0].version != cards[1].version


def test_a_reward_of_whole_groups_gets_all_samples_in_one_request_and_in_one_batch():
    runner = Inline(card=Card(outputs=("mine",), needs_groups=True))
    with serving(runner, max_batch=2) as url:
        reward = client(url, max_items=2)
        assert reward.card.needs_groups
        agrees(reward, 5)
    assert runner.batches == [5]


def test_the_card_comes_from_the_server_and_says_what_is_so_from_afar():
    kept = {"low": -3.0, "higher_is_better": False, "transform": (2.0, 1.0), "requires": ("k",), "licence": "MIT"}
    with serving(Inline(card=Card(outputs=("mine",), memory_gib=7.0, differentiable=True, **kept))) as url:
        found = dataclasses.asdict(client(url).card)
    changed = {"high": math.inf, "differentiable": False, "memory_gib": 0.0, "overlap": True}
    assert found.items() >= (kept | changed).items()


def test_reference_pictures_travel_as_pictures_and_not_as_paths(tmp_path: Path):
    def of_sources(images, prompts, metadata):
        opened = [[int(np.array(Image.open(path))[0, 0, 0]) for path in record["images"]] for record in metadata]
        assert str(tmp_path) not in str(metadata)
        return torch.tensor([float(sum(values)) for values in opened])

    Image.new("RGBA", (4, 4), (30, 0, 0, 0)).save(tmp_path / "clear.png")
    for value in (10, 20):
        Image.new("RGB", (4, 4), (value, 0, 0)).save(tmp_path / f"{value}.webp", lossless=True)
    metadata = [
        {"images": [str(tmp_path / "10.webp"), str(tmp_path / "20.webp")]},
        {"images": [str(tmp_path / "clear.png")]},
    ]
    with serving(Inline(of_sources)) as url:
        found = client(url).score(pictures(2), ["a", "b"], metadata)["mine"]
        assert found.tolist() == [30.0, 255.0]
        with pytest.raises(RewardError, match=r"gone\.png' of a prompt cannot be read"):
            client(url).score(pictures(1), ["a"], [{"images": [str(tmp_path / "gone.png")]}])


# ---- failures


@pytest.mark.parametrize(
    ("status", "broken"),
    [
        *((status, lambda reply: {"error": {"text": "oops"}}) for status in (408, 429, 500, 503)),
        (200, lambda reply: reply | {"results": reply["results"][:-1]}),
        (200, lambda reply: reply | {"results": [*reply["results"][:-1], reply["results"][0]]}),
        (200, lambda reply: reply | {"request_id": "of another"}),
        (200, lambda reply: reply | {"results": [row | {"scores": {}} for row in reply["results"]]}),
        (200, lambda reply: reply | {"results": [row | {"scores": {"mine": "0"}} for row in reply["results"]]}),
        (200, lambda reply: {"schema": 1}),
        (200, lambda reply: []),
    ],
    ids=[*["408", "429", "500", "503"], "short", "doubled", "another request", "no scores", "text", "empty", "list"],
)
def test_a_server_that_fails_or_answers_in_part_is_sent_the_same_request_again(status, broken):
    asked_ids: list[str] = []

    def answer(asked):
        asked_ids.append(asked["request_id"])
        reply = results(asked, number)
        return (status, broken(reply)) if len(asked_ids) == 1 else (200, reply)

    with scripted(answer) as url:
        agrees(client(url), 3)
    assert len(asked_ids) == 2
    assert len(set(asked_ids)) == 1


def test_with_one_of_two_servers_dead_all_samples_are_scored_by_the_other_without_global_random_numbers():
    states = torch.random.get_rng_state(), random.getstate()
    with serving(Inline()) as url:
        agrees(client(dead(), url, max_items=2), 9)
    assert torch.equal(torch.random.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_a_server_that_dies_in_mid_run_loses_no_sample():
    with serving(Inline()) as first:
        runner = Inline()
        with serving(runner) as second:
            reward = client(first, second, max_items=2)
            before, expected = ask(reward, 8)
        assert runner.batches, "requests go to both servers"
        after, _ = ask(reward, 8)
    assert before.tolist() == after.tolist() == expected.tolist()


def test_after_the_deadline_a_sample_is_nan_and_never_a_number(caplog):
    with scripted(lambda asked: (500, {"error": {"text": "out of order"}})) as url:
        reward = client(url, deadline_s=0.5)
        began = time.monotonic()
        found, _ = ask(reward, 3)
    assert found.isnan().all()
    assert time.monotonic() - began < 5
    assert "no score for 3 of 3" in caplog.text
    assert "out of order" in caplog.text


def test_what_ends_a_run_says_that_the_server_is_away():
    with serving(Inline()) as url:
        reward = client(url, deadline_s=0.3)
    scorer = Scorer([WeightedReward("judge", reward)])
    away = r"3 of 3 samples could not be scored.*'judge'.*within deadline_s=0.3; http://127.*ConnectError: .*refused"
    with pytest.raises(RewardFailure, match=away):
        scorer.score(pictures(3), ["0", "1", "2"], [{}] * 3)
    assert scorer.take_counts()["mine_calls"] == 1, "the client has tried for as long as it was told to"


def test_a_server_that_does_not_answer_in_time_is_left_for_another():
    def slow(asked):
        time.sleep(1.0)
        return 200, results(asked, number)

    with scripted(slow) as first, scripted(lambda asked: (200, results(asked, number))) as second:
        reward = client(first, second, timeout_s=0.2, max_items=2, concurrency=2)
        began = time.monotonic()
        agrees(reward, 4)
    assert time.monotonic() - began < 10


def test_one_sample_without_a_score_is_nan_and_the_others_keep_theirs(caplog):
    def answer(asked):
        reply = results(asked, number)
        reply["results"][1] |= {"scores": {"mine": None}, "error": {"kind": "raised", "text": "ValueError: odd"}}
        return 200, reply

    with scripted(answer) as url:
        found, expected = ask(client(url), 3)
    assert found.isnan().tolist() == [False, True, False]
    assert found[2] == expected[2]
    assert "ValueError: odd" in caplog.text


def test_a_sample_that_the_reward_refuses_stops_the_run_as_it_would_here():
    def refuses(images, prompts, metadata):
        raise RewardError("reward 'mine': the prompt asks for no text")

    with serving(Inline(refuses)) as url, pytest.raises(RewardError, match="asks for no text"):
        ask(client(url), 2)


@pytest.mark.parametrize(
    ("status", "changes", "message"),
    [
        *((status, {"error": {"text": "because"}}, f"status {status}: because") for status in (400, 401, 404, 413)),
        (200, {"schema": 2}, "has schema 2; this flowrl has schema 1"),
        (200, {"fingerprint": "other"}, r"compute different things \(same and other\)"),
    ],
)
def test_what_no_further_try_can_mend_stops_the_run_at_once(status, changes, message):
    with scripted(lambda asked: (status, results(asked, number) | changes)) as url:
        reward = client(url)
        with pytest.raises(RewardError, match=message):
            ask(reward, 2)


def test_servers_that_compute_different_things_are_refused():
    with (
        serving(Inline()) as first,
        serving(Inline(card=Card(outputs=("mine",), version="2"))) as second,
        pytest.raises(RewardError, match="compute different things"),
    ):
        client(first, second)


def test_no_server_no_such_reward_and_no_token_are_told_before_anything_is_trained(tmp_path, monkeypatch):
    with pytest.raises(RewardError, match=r"no server answers.*flowrl serve --reward mine"):
        client(dead())
    with serving(Inline(), name="yours") as url, pytest.raises(RewardError, match="no reward 'mine'; it serves: yours"):
        client(url)
    with serving(Inline(), token="secret") as url:
        with pytest.raises(RewardError, match="the token is missing or wrong"):
            client(url)
        (tmp_path / "token").write_text("secret\n")
        monkeypatch.setenv("REWARD_TOKEN", "secret")
        for options in ({"token_file": str(tmp_path / "token")}, {"token_env": "REWARD_TOKEN"}):
            agrees(client(url, **options), 2)
        with pytest.raises(RewardError, match="there is no token in NOT_SET"):
            client(url, token_env="NOT_SET")


# ---- which server


def take(servers: Servers) -> Server:
    server = servers.take(math.inf)
    assert server is not None
    return server


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_least_busy_server_is_asked_and_equals_take_turns():
    servers = Servers(["a", "b", "c"])
    taken = [take(servers).url for _ in range(6)]
    assert sorted(taken[:3]) == sorted(taken[3:]) == ["a", "b", "c"]
    servers.succeeded(servers.servers[1])
    assert take(servers).url == "b"


def test_a_server_that_fails_rests_longer_each_time_and_an_answer_brings_it_back():
    clock = Clock()
    servers = Servers(["a"], clock)
    rests = []
    for _ in range(9):
        server = take(servers)
        servers.failed(server)
        rests.append(server.rests_until - clock.now)
        clock.now = server.rests_until
    for k, rest in enumerate(rests):
        assert 0.5 <= rest / min(0.25 * 2**k, 15.0) <= 1.5
    assert len({round(rest / min(0.25 * 2**k, 15.0), 6) for k, rest in enumerate(rests)}) > 1, "there is jitter"
    servers.succeeded(take(servers))
    servers.failed(take(servers), at_least_s=40.0)
    assert servers.servers[0].rests_until - clock.now == 40.0
    assert servers.take(clock.now + 30) is None


def test_requests_that_fail_together_are_one_failure():
    clock = Clock()
    servers = Servers(["a"], clock)
    taken = [take(servers) for _ in range(8)]
    for server in taken:
        servers.failed(server)
    assert servers.servers[0].failures == 1
    assert servers.servers[0].outstanding == 0


def test_who_waits_for_a_resting_server_goes_on_when_another_request_succeeds():
    servers = Servers(["a"])
    first, second = take(servers), take(servers)
    servers.failed(first, at_least_s=60.0)
    found = []
    waiting = threading.Thread(target=lambda: found.append(servers.take(time.monotonic() + 120)))
    waiting.start()
    servers.succeeded(second)
    waiting.join(5)
    assert found == [servers.servers[0]]
