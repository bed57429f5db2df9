"""Options that no reward may have, and weights that cannot be found: refused with the key, its value and the remedy."""

from __future__ import annotations

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from flowrl.core.errors import ConfigError
from flowrl.reward import RewardError
from flowrl.scoring.entries import reward_plan
from tests import toy_clip
from tests.tiny_rewards.safety import save as save_classifier

SERVED = {"servers": ["http://a"], "reward": "mine"}


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aesthetic", {"version": "v2.5"}, r"version='v2\.5' needs head, the file aesthetic_predictor_v2_5\.pth"),
        (
            "aesthetic",
            {"version": "v2.5", "head": "x.pth", "half_even_crop": True},
            r"half_even_crop is of v1 and v2; version='v2\.5' sees the whole image",
        ),
        ("clip_score", {"frames": 0}, "frames=0"),
        ("clip_score", {"backend": "transformers", "pretrained": "a"}, "pretrained and quick_gelu are open_clip's"),
        ("clip_score", {"backend": "open_clip", "tokenizer": "x"}, "tokenizer is transformers'"),
        *[("degeneracy", {key: value}, f"{key}={value} must be") for key, value in (("black", 0.5), ("flat", 1.5))],
        ("degeneracy", {"black": -0.1}, "black=-0.1 must be"),
        ("diversity", {"bandwidth": 0.0}, "bandwidth=0"),
        *[("jpeg", {"quality": value}, f"quality={value} must be from 1 to 95") for value in (0, 96, -5)],
        ("motion", {"fps": 0.0}, "fps=0.0 must be"),
        *[("motion", {"enough": value}, f"enough={value} must be") for value in (0.0, 1.5)],
        ("ocr", {"min_confidence": 1.5}, "min_confidence=1.5 must be from 0 to 1"),
        ("ocr", {"detection_side": 20}, "detection_side=20 must be at least 32"),
        ("ocr", {"workers": -1}, "workers=-1 must be 0"),
        ("remote", SERVED | {"servers": []}, "must be addresses"),
        ("remote", SERVED | {"servers": ["127.0.0.1:8100"]}, "must be addresses"),
        ("remote", SERVED | {"max_items": 0}, "max_items=0 must be at least 1"),
        ("remote", SERVED | {"start_s": -1.0}, "start_s=-1.0 must not be negative"),
        ("remote", SERVED | {"timeout_s": float("nan")}, "timeout_s = nan: must be a number"),
        ("remote", SERVED | {"token_file": "a", "token_env": "b"}, "not both"),
        ("safety", {"veto_above": 0.0}, "veto_above=0.0 must be above 0"),
        ("safety", {"frames": 0}, "frames=0 must be at least 1"),
        ("video_align", {"fps": -1.0}, "fps=-1.* must be above 0"),
        ("vlm_caption", {"reference": "a cat"}, r"must hold \{\}"),
        *[("vlm_caption", {"jpeg_quality": value}, f"jpeg_quality={value}") for value in (0, 96)],
        ("vlm_caption", {"max_tokens": 0}, "max_tokens=0"),
        ("vlm_caption", {"bertscore": {"model": "mine"}}, "layer is required for model='mine'"),
        ("vlm_caption", {"bertscore": {"layer": -1}}, "layer=-1"),
        ("vlm_judge", {"http": {"concurency": 3}}, r"http\.concurency: unknown key.*did you mean 'concurrency'"),
        ("vlm_judge", {"http": {"concurrency": 0}}, "concurrency=0 must be above 0"),
        ("vlm_judge", {"http": {"top_logprobs": 40}}, "top_logprobs=40 must be between 2 and 20"),
        ("vlm_judge", {"http": {"price_prompt": -1.0}}, "price_prompt=-1.0 must not be negative"),
        *[
            (judge, {"max_tokens": 0}, "max_tokens=0 must be")
            for judge in ("edit_score", "unified_reward", "vlm_judge")
        ],
        *[
            ("geneval", {"counting_confidence": value}, r"counting_confidence=.* must be in \[0, 1\)")
            for value in (-1, 1)
        ],
        ("questions", {"question": "Is it?"}, "question="),
        ("questions", {"question_together": "{question}"}, "question_together="),
        ("questions", {"ask": "together", "worth": "decision"}, "worth="),
        *[(of, {"surplus_penalty": -0.1}, "surplus_penalty=-0.1 must be at") for of in ("shapes", "shapes_motion")],
        ("votes", {"votes_per_sample": 0}, "votes_per_sample=0 must be at least 1"),
        ("votes", {"time_limit": 0.0}, "time_limit=0.0 must be above 0, or null"),
        ("votes", {"grace": -1.0}, "grace=-1.0 must not be negative"),
        ("votes", {"prior": 0.0}, "prior=0.0 must be above 0"),
        ("vlm_judge", {"http": {"retries": -1}}, "retries=-1 must not be negative"),
        ("vlm_judge", {"local": {"batch_size": 0}}, "batch_size=0 must be at least 1"),
        ("vqa_score", {"question": "Is it good?"}, r"must hold \{\}"),
    ],
)
def test_options_that_make_no_sense_are_refused_when_the_configuration_is_read(name, options, message):
    with pytest.raises(ConfigError, match=message):
        reward_plan({"name": name, **options}, "rewards.0")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("aesthetic", {"head": "./nowhere.pth"}, "is no file; give one that is here"),
        ("aesthetic", {"head": "owner/name/head.pth"}, r"'aesthetic' cannot load head\.pth of 'owner/name'"),
        ("diversity", {"backbone": "/nowhere"}, "'diversity' cannot load backbone='/nowhere'; give 'fixed'"),
        ("hpsv2", {}, r"'hpsv2' cannot load HPS_v2\.1_compressed\.pt of 'xswu/HPSv2'"),
        ("motion", {"flow_weights": "/nowhere.pth"}, "cannot load RAFT from flow_weights=.*nowhere.*raft_large_C_T_V1"),
        ("pickscore", {"model": "/nowhere", "tokenizer": "/nowhere"}, "'pickscore' cannot load CLIPModel.*nowhere"),
        ("safety", {"model": "/nowhere"}, "'safety' cannot load the classifier .*nowhere"),
        ("vlm_caption", {"bertscore": {"model": "/nowhere", "layer": 2}}, "cannot load bertscore.model='/nowhere'"),
        ("vlm_judge", {"local": {"model": "/nowhere"}}, "'vlm_judge' cannot load the judge model=.*nowhere"),
    ],
)
def test_weights_that_cannot_be_found_are_named(name, options, message, monkeypatch):
    def fail(repository, file, **options):
        raise OSError(f"no network for {repository}/{file}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(RewardError, match=message):
        reward_plan({"name": name, **options}, "rewards.0").build()


@pytest.mark.parametrize(
    ("name", "save", "lost", "message"),
    [
        ("clip_score", toy_clip.save, "visual_projection.", r"lacks 1 .* such as 'visual_projection\.weight'"),
        ("safety", save_classifier, "classifier.", r"lacks 2 of its weights, such as 'classifier\.bias'"),
    ],
)
def test_a_checkpoint_that_lacks_weights_is_refused_where_transformers_draws_them(name, save, lost, message, tmp_path):
    folder, file = save(tmp_path), tmp_path / "model.safetensors"
    kept = {key: value for key, value in load_file(file).items() if not key.startswith(lost)}
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(RewardError, match=f"'{name}'.*{message}"):
        reward_plan({"name": name, "model": folder, "device": "cpu"}, "rewards.0").build()
