"""What a reward server survives: nothing that fails becomes a score, and no client harms another."""

import contextlib
import json
import socket
import struct
import sys
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from flowrl.apps.command_line import reward_entries
from flowrl.apps.serving.messages import Item, Limits
from flowrl.apps.serving.process import Worker, WorkerFailed
from flowrl.apps.serving.worker import score_items
from flowrl.commands.serve import _token
from flowrl.core.errors import ConfigError
from flowrl.core.wire import SCHEMA, WireImage, write_image
from flowrl.media.transport import pack
from flowrl.reward import Card, Reward, RewardError
from flowrl.scoring.weighted import WeightedReward
from tests.serving import Inline, brightness, message, pictures, serving

REWARD = '''
"""A reward that does what the prompt says."""
import os, time, torch
from flowrl.reward import RewardError

def score(images, prompts, metadata):
    if "raise" in prompts:
        raise ValueError("this prompt is too hard")
    if "hang" in prompts:
        time.sleep(600)
    if "die" in prompts:
        os._exit(3)
    print("a reward may print")
    return torch.stack([(255 * image.mean()).round() for image in images])
'''


@pytest.fixture(scope="module")
def url():
    """Of a server that scores `brightness` and survives all tests of this module."""
    with serving(Inline(), limits=Limits(bytes=200_000, pixels=10_000, items=8, body_s=0.4, head_s=0.4)) as url:
        yield url


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(
        f"{url}/score", content=content, headers={"content-type": "application/json"} | headers, timeout=180
    )


def values(answer: httpx.Response) -> list[float | None]:
    assert answer.status_code == 200, answer.text
    return [row["scores"]["mine"] for row in answer.json()["results"]]


def works(url: str, request_id: str) -> bool:
    return values(post(url, message(3, request_id))) == [0.0, 257.0, 514.0]


def address(url: str) -> tuple[str, int]:
    return "127.0.0.1", int(url.rpartition(":")[2])


# ---- bodies

ITEM = message()["items"][0]


def nested(levels: int) -> list:
    """Lists inside each other."""
    found: list = []
    for _ in range(levels - 1):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"schema": 1, "items": [', "json"),
        (b"\xff\xfe\x00", "json"),
        (b"[" * 100_000, "json"),
        (b'{"schema": 1, "x": NaN}', "json"),
        (b'{"schema": 1, "x": 1e999}', "json"),
        (b"[]", "form"),
        (b"{}", "schema"),
        (message(schema=2), "schema"),
        (message(schema=True), "schema"),
        (message() | {"more": 1}, "form"),
        (message(items=[]), "form"),
        (message(items=[{"id": "a"}]), "form"),
        (message(items=[message()["items"][0]] * 2), "form"),
        (message(items=[message()["items"][0] | {"promt": "x"}]), "form"),
        (message(items=[message()["items"][0] | {"metadata": {"images": ["/etc/passwd"]}}]), "form"),
        (message(items=[message()["items"][0] | {"metadata": {"x": nested(33)}}]), "form"),
        (message() | {"request_id": 7}, "form"),
        (message(request_id="x" * 1000), "form"),
        *((message(reward=value), "form") for value in ([], {}, None, 7)),
        *((message(items=[ITEM | {"image": {"format": kind, "data": ""}}]), "image") for kind in ([], {}, None)),
    ],
)
def test_malformed_messages_are_refused_with_the_reason(url, body, kind):
    answer = post(url, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["kind"] == kind
    assert answer.json()["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("body", "headers", "status", "kind"),
    [
        (message(reward="shapes"), {}, 404, "reward"),
        (message(9), {}, 413, "items"),
        # What a page in a browser could be made to send.
        (message(), {"content-type": "text/plain"}, 415, "type"),
        (message(), {"content-encoding": "gzip"}, 415, "type"),
    ],
)
def test_an_unknown_reward_too_many_items_and_other_types_are_refused(url, body, headers, status, kind):
    answer = post(url, body, **headers)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (status, kind)


def test_a_truncated_picture_has_an_error_and_no_score_while_its_neighbours_are_scored(url):
    body = message(3, "truncated")
    whole = pack(torch.rand(3, 30, 30, generator=torch.Generator().manual_seed(0)), "png")
    body["items"][1]["image"] = write_image(WireImage("png", whole.shape, whole.data[: len(whole.data) // 2]))
    answer = post(url, body)
    assert values(answer) == [0.0, None, 514.0]
    error = answer.json()["results"][1]["error"]
    assert error["kind"] == "image"
    assert "truncated" in error["text"]


def png_that_says(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes whose header promises that size."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(bytes(50_000))) + part(b"IEND", b"")


@pytest.mark.parametrize("shape", [(3, 60_000, 60_000), (3, 1, 10_001), (3, 2**31 - 1, 2**31 - 1)])
def test_a_decompression_bomb_is_refused_by_its_header_before_it_is_decoded(url, shape, monkeypatch):
    monkeypatch.setattr("flowrl.media.transport.unpack", lambda picture: pytest.fail("it was decoded"))
    body = message()
    body["items"][0]["image"] = write_image(WireImage("png", shape, png_that_says(shape[2], shape[1])))
    answer = post(url, body)
    assert (answer.status_code, answer.json()["error"]["kind"]) == (413, "pixels")


def test_a_bomb_whose_shape_lies_is_refused_and_many_small_ones_are_added_up(url):
    body = message()
    body["items"][0]["image"] = write_image(WireImage("png", (3, 4, 4), png_that_says(60_000, 60_000)))
    assert post(url, body).json()["error"]["kind"] == "image"
    body = message(6)
    for item in body["items"]:
        item["image"] = write_image(WireImage("png", (3, 50, 40), png_that_says(40, 50)))
    assert post(url, body).json()["error"]["kind"] == "pixels"


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_of_100_mb_is_refused_where_it_passes_the_limit(url, declared):
    """Without a length it is cut off while it is sent: it is never held, not even read, as a whole."""
    total, piece, sent = 100_000_000, b"x" * 65_536, 0
    length = f"content-length: {total}" if declared else "transfer-encoding: chunked"
    head = f"POST /score HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n{length}\r\n\r\n".encode()
    with socket.create_connection(address(url), timeout=10) as connection:
        connection.sendall(head)
        answer = b""
        with contextlib.suppress(OSError):  # the server hangs up
            while sent < total:
                connection.sendall(piece if declared else b"10000\r\n" + piece + b"\r\n")
                sent += len(piece)
        with contextlib.suppress(OSError):  # its answer may go down with the bytes that it left unread
            answer = connection.recv(65_536)
    assert sent < total / 4
    assert not answer or b"413" in answer.split(b"\r\n")[0]
    assert works(url, f"after 100 MB {declared}")


def test_a_slow_body_and_a_slow_head_are_cut_off_while_others_are_served(url):
    body = json.dumps(message()).encode()
    head = f"POST /score HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with (
        socket.create_connection(address(url), 10) as slow_body,
        socket.create_connection(address(url), 10) as slow_head,
    ):
        slow_body.sendall(head.encode() + body[:10])
        slow_head.sendall(head.encode()[:20])
        assert works(url, "beside slow ones")
        assert b"408" in slow_body.recv(65_536).split(b"\r\n")[0]
        with contextlib.suppress(ConnectionResetError):
            assert slow_head.recv(65_536) == b""


# ---- who may ask


def test_a_missing_or_wrong_token_is_refused_before_the_body_is_read():
    with serving(Inline(), token="secret") as url:
        for token in ("", "Bearer secre", "secret", "Bearer \xe9"):
            headers = {b"authorization": token.encode("latin-1")} if token else {}
            answers = [httpx.get(f"{url}/{page}", headers=headers) for page in ("rewards", "metrics")]
            answers.append(httpx.post(f"{url}/score", content=b"x" * 1000, headers=headers))
            assert [answer.status_code for answer in answers] == [401] * 3, token
        assert values(post(url, message(1), authorization="Bearer secret")) == [0.0]
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_server_for_other_machines_wants_a_token_from_a_file_or_the_environment(tmp_path: Path, monkeypatch):
    (tmp_path / "token").write_text(" secret\n")
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    monkeypatch.setenv("TOKEN", "other")
    assert _token("0.0.0.0", tmp_path / "token", None) == "secret"
    assert _token("10.0.0.1", None, "TOKEN") == "other"
    assert _token("127.0.0.1", None, None) is None
    assert _token("::1", None, None) is None
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ConfigError, match="other machines reach this address"):
            _token(host, None, None)
    for arguments in (
        (tmp_path / "empty", None),
        (tmp_path / "binary", None),
        (tmp_path / "none", None),
        (None, "NO_SUCH_TOKEN"),
    ):
        with pytest.raises(ConfigError, match="--token-"):
            _token("127.0.0.1", *arguments)


def test_options_go_to_the_reward_that_they_name():
    assert reward_entries(["jpeg"], ["quality=90"], prefixes=False) == {"jpeg": {"name": "jpeg", "quality": 90}}
    named = reward_entries(["jpeg", "my/own.py"], ["jpeg.quality=90", "own.a.b=1"], prefixes=False)
    assert named == {"jpeg": {"name": "jpeg", "quality": 90}, "own": {"path": "my/own.py", "a": {"b": 1}}}
    with pytest.raises(ConfigError, match="name its reward"):
        reward_entries(["jpeg", "shapes"], ["quality=90"], prefixes=False)
    with pytest.raises(ConfigError, match="two rewards are called 'jpeg'"):
        reward_entries(["jpeg", "my/jpeg.py"], [], prefixes=False)


# ---- repeated requests, batches


def test_a_repeated_request_has_its_first_answer_and_is_scored_once():
    runner = Inline()
    with serving(runner) as url:
        first, second = post(url, message(2, "same")), post(url, message(2, "same"))
        assert first.content == second.content
        assert runner.batches == [2]
        answer = post(url, message(3, "same"))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (409, "repeated")


def test_a_request_repeated_while_it_is_worked_on_is_scored_once():
    release = threading.Event()

    def waits(images, prompts, metadata):
        assert release.wait(20)
        return brightness(images, prompts, metadata)

    class Threaded(Inline):
        async def run(self, items):
            import asyncio

            return await asyncio.to_thread(asyncio.run, super().run(items))

    runner, found = Threaded(waits), []
    with serving(runner) as url:
        asking = [started(lambda: found.append(values(post(url, message(2, "same"))))) for _ in range(2)]
        wait_for(lambda: counted(url, 'flowrl_batches_total{reward="mine"}') == 1)
        release.set()
        for thread in asking:
            thread.join(20)
    assert found == [[0.0, 257.0]] * 2
    assert runner.batches == [2]


def started(work: Callable[..., None], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def wait_for(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def counted(url: str, sample: str) -> float:
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        if name == sample:
            return float(value)
    return 0.0


def test_requests_that_come_together_share_a_batch_and_large_ones_are_split():
    runner = Inline()
    with serving(runner, max_wait_s=5.0, max_batch=4) as url:
        found: dict[str, Any] = {}

        def ask(name: str, count: int) -> None:
            found[name] = values(post(url, message(count, name)))

        for thread in [started(ask, "a", 2), started(ask, "b", 6)]:
            thread.join(20)
    assert found == {"a": [0.0, 257.0], "b": [257.0 * k for k in range(6)]}
    assert runner.batches == [4, 4]


BYTES_OF_THREE = sum(len(pack(picture, "png").data) for picture in pictures(3))


@pytest.mark.parametrize("limits", [{"waiting": 3}, {"waiting_bytes": BYTES_OF_THREE}])
def test_what_waits_beyond_the_limit_is_refused_for_another_try(limits):
    with serving(Inline(), limits=Limits(**limits)) as url:
        answer = post(url, message(4))
        assert (answer.status_code, answer.json()["error"]["kind"]) == (503, "busy")
        assert float(answer.headers["retry-after"]) > 0
        assert all(works(url, f"small enough {k}") for k in range(2))


# ---- rewards that fail


def test_a_scorer_that_raises_costs_its_own_sample_alone_and_nan_is_null():
    def odd(images, prompts, metadata):
        if "1" in prompts:
            raise ValueError("odd prompt")
        if "3" in prompts:
            raise RewardError("reward 'mine': not this one")
        scores = brightness(images, prompts, metadata)
        return torch.where(scores == 514.0, torch.nan, scores)

    with serving(Inline(odd)) as url:
        answer = post(url, message(5))
        assert values(answer) == [0.0, None, None, None, 1028.0]
        errors = [row["error"] for row in answer.json()["results"]]
        assert errors[0] is None
        assert errors[1]["kind"] == "raised"
        assert errors[1]["text"].startswith("ValueError: odd prompt (test_serving.py:")
        assert errors[2] == {"kind": "nan", "text": "the reward returned NaN for mine"}
        assert errors[3]["kind"] == "refused"
        assert counted(url, 'flowrl_item_errors_total{kind="raised",reward="mine"}') == 1


@pytest.mark.parametrize("whole", [False, True])
def test_a_scorer_that_calls_sys_exit_costs_its_sample_and_not_the_worker(whole: bool):
    def leaves(images, prompts, metadata):
        if "1" in prompts:
            sys.exit()
        return brightness(images, prompts, metadata)

    entry = WeightedReward("mine", Reward(leaves, Card(outputs=("mine",), needs_groups=whole)))
    samples = [Item(str(k), str(k), {}, pack(torch.full((3, 4, 4), k / 255), "uint8")) for k in range(3)]
    found = score_items(entry, samples)
    kinds = [row["error"] and row["error"]["kind"] for row in found]
    assert kinds == (["raised"] * 3 if whole else [None, "raised", None])
    assert "SystemExit (test_serving.py:" in found[1]["error"]["text"]


class Stumbling(Inline):
    """Raises what no runner should, or forgets a result, the first times that it is asked."""

    def __init__(self, *failures: Exception | str) -> None:
        super().__init__()
        self.failures, self.killed = list(failures), 0

    async def run(self, items):
        found = await super().run(items)
        failure = self.failures.pop(0) if self.failures else None
        if isinstance(failure, Exception):
            raise failure
        return found[:-1] if failure == "forgets" else found

    def kill(self):
        self.killed += 1


def test_an_exception_outside_of_the_reward_costs_its_request_and_not_the_server():
    runner = Stumbling(RecursionError("too deep"), "forgets", ValueError("strange"))
    with serving(runner) as url:
        for name, text in (("deep", "too deep"), ("short", "1 results for 2"), ("strange", "strange")):
            answer = post(url, message(2, name))
            assert values(answer) == [None, None]
            error = answer.json()["results"][0]["error"]
            assert error["kind"] == "failed"
            assert text in error["text"]
        assert works(url, "after all that")
    assert runner.killed == 3


def test_a_decoder_may_raise_anything_and_costs_its_own_picture_alone(monkeypatch):
    from flowrl.apps.serving import worker

    def decoded(picture, own=worker.unpack):
        if picture.shape == (3, 2, 2):
            raise struct.error("a chunk that no one thought of")
        return own(picture)

    monkeypatch.setattr(worker, "unpack", decoded)
    body = message(3, "strange picture")
    body["items"][1]["image"] = write_image(pack(torch.zeros(3, 2, 2), "png"))
    with serving(Inline()) as url:
        answer = post(url, body)
    assert values(answer) == [0.0, None, 514.0]
    assert answer.json()["results"][1]["error"]["kind"] == "image"


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """(address, its worker) of a server with a reward in a process of its own, which the prompt tells what to do."""
    file = tmp_path_factory.mktemp("reward") / "odd.py"
    file.write_text(REWARD)
    worker = Worker({"path": str(file)})
    with serving(worker, name="odd", limits=Limits(score_s=1.5)) as url:
        yield url, worker


def odd(url: str, request_id: str, *prompts: str) -> tuple[list[float | None], set[str]]:
    """(scores, kinds of error)."""
    body = message(len(prompts), request_id, reward="odd")
    for item, prompt in zip(body["items"], prompts, strict=True):
        item["prompt"] = prompt
    answer = post(url, body)
    assert answer.status_code == 200, answer.text
    rows = answer.json()["results"]
    return [row["scores"]["odd"] for row in rows], {row["error"]["kind"] for row in rows if row["error"]}


def test_a_reward_in_a_process_scores_and_its_exceptions_come_back(processes):
    url, worker = processes
    pid = worker.process.pid
    assert odd(url, "fine", "a", "b", "c") == ([0.0, 1.0, 2.0], set())
    assert odd(url, "raises", "a", "raise", "c") == ([0.0, None, 2.0], {"raised"})
    assert worker.process.pid == pid


def test_a_scorer_that_hangs_is_ended_and_started_anew_and_only_its_own_request_pays(processes):
    url, worker = processes
    pid, found = worker.process.pid, {}

    def ask(name: str, *prompts: str) -> None:
        found[name] = odd(url, name, *prompts)

    threads = [started(ask, "hangs", "a", "hang")]
    wait_for(lambda: counted(url, 'flowrl_batches_total{reward="odd"}') >= 3)
    threads.append(started(ask, "waits", "a", "b"))
    health = httpx.get(f"{url}/health", timeout=2)  # the server itself hangs at no time
    assert health.json()["rewards"]["odd"]["workers"] == 1
    for thread in threads:
        thread.join(180)
    assert found == {"hangs": ([None, None], {"time"}), "waits": ([0.0, 1.0], set())}
    assert worker.process.pid != pid
    assert counted(url, 'flowrl_worker_restarts_total{reward="odd"}') == 1


@pytest.mark.slow
def test_a_scorer_that_kills_its_process_is_tried_once_more_and_then_given_up(processes):
    url, _ = processes
    assert odd(url, "dies", "die", "b") == ([None, None], {"died"})
    assert odd(url, "lives", "a", "b") == ([0.0, 1.0], set())


@pytest.mark.slow
def test_a_reward_that_cannot_be_built_ends_the_start_with_its_reason():
    with (
        pytest.raises(WorkerFailed, match=r"quality=200 must be from 1 to 95"),
        serving(Worker({"name": "jpeg", "quality": 200})),
    ):
        pass


# ---- what it says of itself


def test_health_and_rewards_name_schema_versions_and_cards(url):
    health, rewards = httpx.get(f"{url}/health").json(), httpx.get(f"{url}/rewards").json()
    assert (health["status"], health["schema"]) == ("ok", SCHEMA)
    assert health["rewards"]["mine"]["versions"] == {"flowrl": "here"}
    assert rewards["limits"] == {"items": 8, "bytes": 200_000, "pixels": 10_000}
    assert rewards["rewards"]["mine"]["fingerprint"] == health["rewards"]["mine"]["fingerprint"]
    assert rewards["rewards"]["mine"]["card"]["high"] is None
    assert httpx.get(f"{url}/docs").status_code == 404


def test_metrics_are_in_the_text_format_of_prometheus(url):
    assert works(url, "counted")
    page = httpx.get(f"{url}/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {line.split()[2] for line in page.text.splitlines() if line.startswith("# TYPE")}
    assert {"flowrl_requests_total", "flowrl_request_seconds", "flowrl_waiting_items"} <= names
    buckets = [float(x.split()[-1]) for x in page.text.splitlines() if x.startswith("flowrl_request_seconds_bucket")]
    assert buckets == sorted(buckets)
    assert buckets[-1] == counted(url, "flowrl_request_seconds_count") > 0
