"""A judge of the test in place of every judge."""

import pytest
from flowrl.rewards._judges import backends

from tests.tiny_rewards.judges import Scripted


@pytest.fixture
def scripted(monkeypatch):
    judge = Scripted()
    monkeypatch.setattr(backends.Backend, "load", lambda self, reward, default: judge)
    return judge
