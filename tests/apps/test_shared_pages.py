"""Pages go to other people: none of any kind says in which folder of whose machine something lies."""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from flowrl.apps.gallery import build, images
from flowrl.core.errors import WriteError
from tests.apps.folders import Page, change, make_run, write_run
from tests.apps.gallery.test_server import serving
from tests.apps.local import ask
from tests.apps.voting import test_vote
from tests.apps.voting.conftest import under_way
from tests.apps.voting.test_vote import voting
from tests.apps.voting.test_vote_waiting import ask as pose

HOME, BLANK = "/home/ann/private", "/home/ann/secret place"
ROOTED = re.compile(r"(?:^|[\s\"'=(,])(?:/|~/)[\w.-]+/")
"""Start of an absolute path of more than one part."""


def told(folder: Path, prompts: str) -> Path:
    """A run, all of whose files have absolute paths: with a blank in a folder, and of its own folder."""
    config = yaml.safe_load((folder / "config.yaml").read_text())
    config["rewards"] = [{"path": f"{BLANK}/mine.py", "weight": 1.0}]
    config["model"]["path"] = f"/data/ann/{prompts}/tiny"
    config["data"]["prompts"], config["output"] = f"{BLANK}/{prompts}/words.txt", str(folder.parent)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    change(folder / "provenance.json", command="flowrl train /home/ann/a.yaml", python="/usr/ann/bin/python3")
    what = f"rewards: {BLANK}/mine.py had 3 lines then, 4 now (the old one is {folder}/inputs/mine.py)"
    (folder / "inputs.json").write_text(json.dumps({"inputs": [], "changes": [{"iteration": 20, "what": [what]}]}))
    guard = {"mode": "warn", "metric": "shapes_strict", "alarms": [{"sentence": f"{BLANK}/mine.py gives no scores."}]}
    change(folder / "summary.json", guard=guard)
    return folder


def stop(folder: Path) -> None:
    command = f"flowrl train {folder} --resume"
    change(folder / "summary.json", status="stopped", reason=f"no space in {HOME}/runs", command=command)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = make_run(tmp_path / "one" / "run", name="run", num_prompts=12, iterations=20)
    other = Path(shutil.copytree(first, tmp_path / "two" / "run"))
    return [told(first, "mine"), told(other, "theirs")]


def shown(page: Page) -> str:
    """Everything that a reader sees, or has under the pointer or a link."""
    return "\n".join([page.text(), *(value for name, value in page.attributes if not value.startswith("data:"))])


def require_silent(text: str, tmp_path: Path) -> None:
    for word in ("/home", "secret place", "private", "/data", "/usr", str(tmp_path), tmp_path.name):
        assert word not in text, text[max(0, text.index(word) - 200) : text.index(word) + 100]
    assert not ROOTED.search(text), ROOTED.search(text)


@pytest.mark.parametrize("ended", [True, False], ids=["finished", "stopped"])
def test_no_absolute_path_stands_in_a_report(runs, tmp_path, ended):
    if not ended:
        stop(runs[0])
    page = Page(build([runs[0]]))
    require_silent(shown(page), tmp_path)
    assert "mine.py x 1" in page.text("dd"), "the names of the files stay"
    assert "mine.py had 3 lines then, 4 now (the old one is run/inputs/mine.py)" in page.text("div")
    assert "flowrl train a.yaml" in page.text("dd")
    assert ("Go on with: flowrl train run --resume" in page.text("div")) is not ended


def test_no_absolute_path_stands_in_a_comparison_which_tells_equal_names_apart(runs, tmp_path):
    page = Page(build(runs, tmp_path / "both"))
    require_silent(shown(page), tmp_path)
    assert {"run (one/run)", "run (two/run)"} <= {link.strip() for link in page.texts["a"]}
    assert "compared, but evaluated with model" in page.text("dd").lower()
    assert {"mine/words.txt", "theirs/words.txt", "mine/tiny", "theirs/tiny"} <= set(page.texts["td"])


def test_no_absolute_path_stands_in_a_live_page_or_its_parts(runs, tmp_path):
    stop(runs[0])
    with serving(*runs) as server:
        for address in ("/", "/run/0/"):
            _, data, _ = ask(server, address)
            file = tmp_path / "page.html"
            file.write_bytes(data)
            require_silent(shown(Page(file)), tmp_path)
            _, data, _ = ask(server, f"{address}parts?have=")
            file.write_text(json.loads(data)["main"])
            require_silent(shown(Page(file)), tmp_path)


def test_no_absolute_path_stands_in_what_a_voter_reads(runs, tmp_path, monkeypatch):
    with voting(runs[0]) as server:
        voter = test_vote.Page(server)
        token = voter.state()["pair"]["token"]
        require_silent(voter.html + json.dumps(voter.state()), tmp_path)

        def full(vote: object) -> None:
            raise WriteError(f"{HOME}/votes.jsonl: the disk is full")

        monkeypatch.setattr(server.ballot.book, "add", full)
        code, said = voter.post("vote", pair=token, choice="left")
        require_silent(json.dumps(said), tmp_path)
        assert (code, said["problem"]) == (507, "votes.jsonl: the disk is full")


def test_nor_in_what_a_voter_of_a_run_reads_that_has_stopped(tmp_path):
    folder = write_run(tmp_path / "run", {"name": "run", "seed": 0, "rewards": [{"name": "votes"}]})
    with ExitStack() as served:
        with under_way(folder):
            pose(folder, 0.1, 0.5)
            voter = test_vote.Page(served.enter_context(voting(folder)))
            token = voter.state()["pair"]["token"]
        stop(folder)
        code, said = voter.post("vote", pair=token, choice="left")
        assert (code, "no space in runs. Go on with: flowrl train run --resume" in said["problem"]) == (409, True)
        require_silent(json.dumps([said, voter.state()]), tmp_path)


def test_a_page_that_shares_no_folder_with_an_image_has_no_link_to_it(tmp_path):
    large = tmp_path / "large.png"
    Image.fromarray(np.zeros((8, 600, 3), dtype=np.uint8)).save(large)
    links = [(images.OnDisk(at).image(large, 384) or {})["link"] for at in (tmp_path / "page", Path("/nowhere/page"))]
    assert links == ["../large.png", None]
