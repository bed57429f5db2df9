"""A stand-in for a judge on a server: ratings and points that follow the brightness of the image.

python -m tests.tiny_suites.chat > url &     # serves until it is ended; the file holds the address
"""

import json
import re
import time

from tests.fake_chat import FakeChat, Reply, Request


def reply(request: Request) -> Reply:
    """JSON in the form that a rubric or a list of points asks for."""
    bright = int(request.images[-1].mean())
    keys = re.search(r"exactly these keys: (.*)\.", request.text)
    if keys is not None:
        names = keys[1].split(", ")
        top = 1 if names == ["score"] else 2
        return Reply(text=json.dumps({name: (bright + place) % (top + 1) for place, name in enumerate(names)}))
    found = re.search(r"with exactly (\d+) entries", request.text)
    assert found is not None, request.text
    return Reply(
        text=json.dumps({"points": [{"reason": "so", "score": (bright >> n) % 2} for n in range(int(found[1]))]})
    )


if __name__ == "__main__":
    chat = FakeChat()
    chat.reset(reply)
    print(chat.url, flush=True)
    while True:
        time.sleep(60)
