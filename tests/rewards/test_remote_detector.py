"""The HTTP detector's client against a server that answers as it is told to."""

import base64
import io
import sys
from contextlib import ExitStack

import numpy as np
import pytest
from flowrl.rewards._detection.detectors import Detection, DetectionError
from flowrl.rewards._detection.remote import RemoteDetector, Unreachable
from PIL import Image

from flowrl.reward import RewardError
from tests.serving import scripted

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
DOG = {"label": "dog", "confidence": 0.5, "box": [1, 2, 5, 6]}


def png(mask: np.ndarray) -> str:
    file = io.BytesIO()
    Image.fromarray(mask.astype(np.uint8) * 255).save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


@pytest.fixture
def served():
    """served(*answers): (detector on a server that gives them in turn, its requests).

    An answer is a status, or a function of the request.
    """
    with ExitStack() as stack:

        def start(*answers, **options):
            requests = []

            def answer(request):
                requests.append(request)
                given = answers[len(requests) - 1]
                return (given, b"") if isinstance(given, int) else (200, given(request))

            url = stack.enter_context(scripted(answer, path="/detect"))
            return RemoteDetector(f"{url}/", backoff_s=0.0, **options), requests

        yield start


def reply(**more):
    return lambda request: {"schema": 1, "id": request["id"]} | more


def test_the_picture_goes_out_without_loss_and_the_objects_come_back(served):
    mask = np.zeros((6, 8), dtype=bool)
    mask[2:4, 1:3] = True
    detector, requests = served(reply(objects=[DOG | {"mask": png(mask)}, DOG | {"label": "cat", "mask": None}]))
    with_mask, without = detector(PIXELS)
    assert without == Detection("cat", 0.5, (1.0, 2.0, 5.0, 6.0))
    assert (with_mask.label, with_mask.box) == ("dog", (1.0, 2.0, 5.0, 6.0))
    assert np.array_equal(with_mask.mask, mask)
    sent = Image.open(io.BytesIO(base64.b64decode(requests[0]["image"])))
    assert np.array_equal(np.asarray(sent), PIXELS)


def test_a_corner_a_little_outside_is_brought_back(served):
    detector, _ = served(reply(objects=[DOG | {"box": [-0.5, 0, 8.2, 7]}]))
    assert detector(PIXELS)[0].box == (0.0, 0.0, 8.0, 6.0)


def test_a_busy_server_is_asked_again_with_the_same_id(served):
    detector, requests = served(503, 500, 429, reply(objects=[]))
    assert detector(PIXELS) == []
    assert len({request["id"] for request in requests}) == 1


def test_a_server_that_stays_away_is_named_and_nothing_is_scored(served):
    detector, requests = served(*[503] * 9, tries=3)
    with pytest.raises(Unreachable, match=r"no answer in 3 tries \(status 503\)"):
        detector(PIXELS)
    assert len(requests) == 3
    with pytest.raises(Unreachable, match="ConnectError"):
        RemoteDetector("http://127.0.0.1:9", tries=2, backoff_s=0.0)(PIXELS)


def test_a_picture_that_the_server_cannot_look_at_is_one_failure(served):
    detector, _ = served(reply(error="out of memory"))
    with pytest.raises(DetectionError, match="out of memory"):
        detector(PIXELS)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (403, "refused the request with status 403"),
        (lambda request: b"<html>", "answered 200 without JSON"),
        (lambda request: [], "did not answer in schema 1"),
        (lambda request: {"schema": 1, "id": "another", "objects": []}, "under the request's id"),
        (lambda request: {"schema": 2, "id": request["id"], "objects": []}, "in schema 1"),
        (reply(), "KeyError: 'objects'"),
        (reply(objects=[{"label": "dog"}]), "KeyError: 'confidence'"),
        (reply(objects=[DOG | {"confidence": 1.5}]), "confidence 1.5"),
        (reply(objects=[DOG | {"box": [5, 2, 1, 6]}]), "holds no pixel"),
        (reply(objects=[DOG | {"box": [float("nan"), 2, 1, 6]}]), "holds no pixel"),
        (reply(objects=[DOG | {"box": [1, 2, 3]}]), "ValueError"),
        (reply(objects=[DOG | {"mask": png(np.ones((3, 3)))}]), r"a mask of \(3, 3\) for an image of \(8, 6\)"),
        (reply(objects=[DOG | {"mask": "AAAA"}]), "UnidentifiedImageError"),
    ],
)
def test_an_answer_that_is_not_of_the_schema_stops_with_the_reason(served, answer, reason):
    detector, requests = served(answer)
    with pytest.raises(RewardError, match=reason):
        detector(PIXELS)
    assert len(requests) == 1


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    with pytest.raises(RewardError, match=r"pip install 'flowrl\[serve\]'"):
        RemoteDetector("http://127.0.0.1:9")
