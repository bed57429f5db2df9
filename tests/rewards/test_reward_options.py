"""Options that no reward may have, and weights that cannot be found: refused with the key, its value and the remedy."""

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from flowrl.core.errors import ConfigError
from flowrl.reward import RewardError
from flowrl.scoring.entries import reward_plan
from tests import toy_clip
from tests.tables import table
from tests.tiny_rewards.safety import save as save_classifier


@pytest.mark.parametrize(
    ("name", "options", "message"),
    table(__file__, "refused"),
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
