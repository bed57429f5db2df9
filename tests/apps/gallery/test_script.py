"""Functions of the page's script that need no browser, in Node."""

import json
import re
import shutil
import subprocess
from typing import Any

import pytest

from flowrl.apps.gallery.rendering import TEMPLATES

NODE = shutil.which("node")
pytestmark = pytest.mark.skipif(NODE is None, reason="no node on the PATH")


def run(file: str, name: str, code: str) -> Any:
    """The value of an expression that uses the function `name` of a script file."""
    text = (TEMPLATES / "script" / f"{file}.js").read_text()
    found = re.search(rf"^function {name}\(.*?^}}", text, re.DOTALL | re.MULTILINE)
    assert found
    assert NODE is not None
    program = f"{found[0]}\nconsole.log(JSON.stringify({code}))"
    done = subprocess.run([NODE, "-e", program], capture_output=True, text=True, timeout=60, check=True)
    return json.loads(done.stdout)


def test_cards_are_in_the_order_of_their_gain_and_those_without_a_score_come_last():
    gains = ["0.5", "nan", "-0.3", "nan", "-0.9", "0.1"]
    cards = json.dumps([{"dataset": {"gain": gain}} for gain in gains])
    code = f"[1, -1].map(s => {cards}.sort((a, b) => byGain(a, b, s)).map(c => c.dataset.gain))"
    worst, best = run("prompts", "byGain", code)
    assert worst == ["-0.9", "-0.3", "0.1", "0.5", "nan", "nan"]
    assert best == ["0.5", "0.1", "-0.3", "-0.9", "nan", "nan"]


def test_a_reading_is_found_again_by_its_number_with_a_gap_between_thousands():
    code = '["iteration 40: 3", "20 000: one 0.5, two 0.6", "1.25: 7"].map(placeIn)'
    assert run("charts", "placeIn", code) == [40, 20000, 1.25]


def test_below_the_last_card_the_key_k_leads_to_it():
    page = (
        "globalThis.viewer = {open: false}; globalThis.isShown = () => true; globalThis.currentCard = () => null;"
        "const seen = [], card = top => ({getBoundingClientRect: () => ({top}), scrollIntoView() {},"
        " querySelector: () => ({focus: () => seen.push(top)})});"
    )
    press = (
        "(tops, by) => { globalThis.document = {querySelectorAll: () => tops.map(card)}; step(by); return seen.pop(); }"
    )
    code = f"(() => {{ {page} const press = {press}; "
    code += "return [press([-9, -3], -1), press([-9, 3], -1), press([-9, 3], 1)] })()"
    assert run("keys", "step", code) == [-3, -9, 3]


def test_a_prompt_without_spaces_is_cut_where_the_line_of_a_copied_image_is_full():
    pen = "{measureText: text => ({width: [...text].length})}"
    code = f"['a red circle left', '\u4e00\u53ea\u732b\u5728\u684c\u5b50\u4e0a\u9762'].map(t => lines({pen}, t, 6))"
    assert run("share", "lines", code) == [
        ["a red", "circle", "left"],
        ["\u4e00\u53ea\u732b\u5728\u684c\u5b50", "\u4e0a\u9762"],
    ]
