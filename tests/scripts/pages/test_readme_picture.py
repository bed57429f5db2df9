"""README's picture and table come from a finished run, each model at its best guidance."""

import json

from PIL import Image

from scripts.pages import readme_picture


def test_each_model_is_shown_at_its_best_guidance(tmp_path):
    best = {"base": 4.0, "tuned": 1.0}
    summary = {f"{model}_best_guidance": {"guidance_scale": scale} for model, scale in best.items()}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    prompts = [f"caption {k}" for k in range(12)]
    for tag, colour in (("base", "blue"), ("base-guidance-4", "white"), ("tuned", "yellow")):
        (tmp_path / "eval" / tag).mkdir(parents=True)
        for k in range(12):
            Image.new("RGB", (32, 32), colour).save(tmp_path / "eval" / tag / f"{k:05d}-0.png")
        scores = {"shapes_strict": [[float(tag == "tuned")]] * 12}
        (tmp_path / "eval" / f"{tag}.json").write_text(json.dumps({"prompts": prompts, "scores": scores}))
    assert readme_picture.at_best(tmp_path, "base") == ("base-guidance-4", "base\nCFG 4")
    assert readme_picture.at_best(tmp_path, "tuned") == ("tuned", "tuned\nCFG 1")
    shown = {colour for _, colour in readme_picture.draw(tmp_path).getcolors(10**6) or ()}
    assert {(255, 255, 0), readme_picture.RIGHT, readme_picture.WRONG} <= shown
    assert (0, 0, 255) not in shown
