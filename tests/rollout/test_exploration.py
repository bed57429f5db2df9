"""Two-stage exploration (arXiv 2604.06916): the choice, its fidelity, and the cheaper copy."""

import json
import re
import sys

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flowrl.config.load import load_config, resolve
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import SampleId
from flowrl.rollout.exploration import choose, fidelity, require_pool
from flowrl.rollout.noise import Noise
from flowrl.rollout.options import ExplorationConfig, PreviewKind
from flowrl.rollout.preview import Preview
from tests import native
from tests import tiny_pipelines as pipelines
from tests import tiny_sd3 as tiny
from tests.toys import SHAPE, ToyAdapter

NAN = float("nan")


# ---- the choice


@pytest.mark.parametrize(
    ("scores", "keep", "chosen"),
    [
        ([0.3, 0.9, 0.1, 0.5, 0.8, 0.2], 4, [1, 2, 4, 5]),
        ([1.0] * 6, 2, [0, 5]),  # ties, in their order
        ([NAN, 0.9, 0.1, 0.5], 2, [1, 2]),
        ([NAN, NAN, NAN, 0.5], 2, [0, 3]),  # failed ones, where too few are left
        ([0.3, 0.2, 0.1, 0.4], 4, [0, 1, 2, 3]),
    ],
)
def test_the_best_and_the_worst_are_chosen_in_rising_order(scores, keep, chosen):
    assert choose(torch.tensor([scores]), keep, "best_worst", (0, 1)).tolist() == [chosen]


def test_a_strictly_rising_map_of_the_scores_changes_no_choice():
    scores = torch.rand(5, 16, generator=torch.Generator().manual_seed(0))
    for rising in (torch.exp, lambda s: 3 * s - 7, lambda s: s**3):
        assert torch.equal(choose(scores, 6, "best_worst", (0, 1)), choose(rising(scores), 6, "best_worst", (0, 1)))


def test_the_variance_rule_takes_what_varies_most():
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.1, 9.0]])
    assert 4 in choose(scores, 3, "variance", (0, 1))[0].tolist()
    assert choose(scores, 5, "variance", (0, 1)).tolist() == [[0, 1, 2, 3, 4]]


def test_random_choices_are_those_of_their_key():
    scores = torch.rand(2, 32)
    first = choose(scores, 8, "random", (0, 1))
    assert torch.equal(first, choose(-scores, 8, "random", (0, 1)))
    assert not torch.equal(first, choose(scores, 8, "random", (0, 2)))
    assert not torch.equal(first[0], first[1])
    assert choose(scores[:, :4], 4, "random", (0, 1)).tolist() == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize(
    ("options", "group", "words"),
    [
        ({"pool": 4}, 8, "pool=4 is less than rollout.group_size=8"),
        ({"pool": 9}, 5, "keep=5: best_worst"),
        ({"pool": 0}, 1, "pool=0 must be positive"),
        ({"pool": 2, "num_inference_steps": 0}, 2, "num_inference_steps=0"),
        ({"pool": 2, "least_hit_rate": 2.0}, 2, r"least_hit_rate=2\.0 must lie in"),
        ({"pool": 2, "check_prompts": -1}, 2, "check_prompts=-1"),
    ],
)
def test_a_pool_that_gives_no_group_and_numbers_out_of_range_are_refused(options, group, words):
    with pytest.raises(ValueError, match=words):
        require_pool(ExplorationConfig(**options), group)


# ---- fidelity


def test_a_look_that_ranks_as_the_truth_is_perfect_and_one_upside_down_finds_nothing():
    truth = torch.arange(24.0).expand(3, 24)
    perfect = fidelity(truth**3, truth, 8)
    assert (perfect.kendall, perfect.spearman, perfect.hit_rate) == pytest.approx((1, 1, 1))
    assert (perfect.top_rank, perfect.bottom_rank, perfect.prompts) == (2.5, 2.5, 3)
    wrong = fidelity(-truth, truth, 8)
    assert (wrong.kendall, wrong.hit_rate, wrong.top_rank) == pytest.approx((-1, 0, 22.5))


def test_noise_between_them_costs_hits():
    generator = torch.Generator().manual_seed(0)
    truth = torch.rand(40, 48, generator=generator)
    rates = [fidelity(truth + s * torch.randn(40, 48, generator=generator), truth, 12).hit_rate for s in (0, 0.1, 1)]
    assert rates[0] == 1
    assert rates[0] > rates[1] > rates[2] > 6 / 48  # above chance


def test_equal_truths_count_as_found_and_prompts_without_spread_say_nothing():
    truth = torch.tensor([[0.0] * 4 + [1.0] * 4, [1.0] * 8])
    look = torch.tensor([[0.3, 0.1, 0.2, 0.0, 0.8, 0.9, 0.5, 0.6]] * 2)
    found = fidelity(look, truth, 4)
    assert (found.hit_rate, found.prompts) == (1, 1)
    assert fidelity(look[1:], truth[1:], 4).prompts == 0


# ---- noise of the chosen


def test_a_chosen_sample_starts_from_its_candidates_noise_whatever_the_batch():
    pool, chosen = Noise(0, "rollout", 3, SHAPE), torch.tensor([[5, 2], [7, 0]])
    kept = Noise(0, "rollout", 3, SHAPE, chosen=chosen)
    ids = [SampleId(0, 0), SampleId(1, 1), SampleId(0, 1)]
    candidates = [SampleId(0, 5), SampleId(1, 0), SampleId(0, 2)]
    assert torch.equal(kept.initial(ids), pool.initial(candidates))
    assert torch.equal(kept.step(ids, 2), pool.step(candidates, 2))
    assert torch.equal(kept.initial(ids[1:2]), kept.initial(ids)[1:2])


# ---- the cheaper copy


def test_the_merged_copy_predicts_as_the_adapted_network_and_follows_it(sd3):
    weights = native.lora(sd3, noise=0.1)
    preview = Preview(sd3, "merged")
    for seed in (1, 2):
        for parameter in weights.parameters.values():
            parameter.data.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
        expected = native.output(sd3, 1.0)
        preview.follow()
        with preview.using():
            assert_close(native.output(sd3, 1.0), expected, rtol=1e-4, atol=1e-4)
        # Outside, the network itself is back, adapter and gradients included.
        assert torch.equal(native.output(sd3, 1.0), expected)
    assert not any("lora" in name for name, _ in preview.network.named_parameters())


def test_the_merged_weights_are_the_base_plus_the_update(sd3):
    name = "transformer_blocks.0.attn.to_q"
    before = sd3.network.get_submodule(name).weight.detach().clone()
    weights = native.lora(sd3, noise=0.1)
    preview = Preview(sd3, "merged")
    preview.follow()
    low, high = (weights.parameters[f"{name}.lora_{side}.default.weight"] for side in "AB")
    update = native.LORA.alpha / native.LORA.rank * high @ low
    assert float(update.detach().abs().max()) > 0.01
    assert_close(preview.network.get_submodule(name).weight, before + update)


def test_full_weights_are_taken_over_and_half_precision_is_near(sd3):
    preview = Preview(sd3, "bfloat16")
    for parameter in sd3.network.parameters():
        parameter.data.mul_(1.01)
    preview.follow()
    expected = native.output(sd3, 1.0)
    with preview.using():
        found = native.output(sd3, 1.0)
    assert not torch.equal(found, expected)
    assert float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


def test_every_copy_is_prepared_once_the_policy_needs_none_and_the_generic_adapter_has_none():
    prepared: list[nn.Module] = []
    adapter = ToyAdapter()
    kinds: tuple[tuple[PreviewKind, int], ...] = ("merged", 1), ("policy", 0)
    for network, copies in kinds:
        preview = Preview(adapter, network, prepared.append)
        preview.follow()
        preview.follow()
        assert prepared == [preview.network] * copies
        prepared.clear()
    with preview.using():
        assert preview.network is None
    adapter.own_network = False
    with pytest.raises(ModelError, match=r"network='bfloat16': the generic adapter"):
        Preview(adapter, "bfloat16")


def test_a_copy_of_wan_is_what_predicts_and_two_experts_have_none():
    one, two = (native.adapter("wan", pipelines.make(name), (16, 16)) for name in ("wan", "wan_2_2"))
    x = torch.randn(1, *one.latent_shape(), generator=torch.Generator().manual_seed(1))
    t, cond = one.schedule(4).timesteps[1:2], one.encode(["a"])
    preview = Preview(one, "merged")
    preview.follow()
    with torch.no_grad(), preview.using():
        before = one.predict(x, t, cond, 1.0)
        for parameter in preview.network.parameters():
            parameter.mul_(1.1)
        assert not torch.equal(one.predict(x, t, cond, 1.0), before)
    with pytest.raises(ModelError, match="several experts"):
        Preview(two, "merged")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"shard": True}, "model.shard"),
        ({"lora": {"rank": 2}, "memory": {"quantize": "int8"}}, "model.memory"),
    ],
)
def test_weights_without_a_plain_copy_are_refused_before_a_model_is_loaded(options, key):
    model = json.dumps({"name": "sd3", "path": "tiny-sd3"} | options)
    words = ["rollout.exploration={pool: 32, network: bfloat16}", f"model={model}"]
    with pytest.raises(ConfigError, match=rf"network=bfloat16: weights that {re.escape(key)}"):
        resolve(load_config(tiny.ROOT / "configs" / "lab" / "diffusion_nft.yaml", words))


@pytest.mark.parametrize(
    ("torchao", "network", "words"),
    [(object(), "float8", r"compute capability 8\.9"), (None, "int8", r"pip install 'flowrl\[quant\]'")],
)
def test_few_bits_want_their_gpu_and_their_library(monkeypatch, torchao, network, words):
    monkeypatch.setitem(sys.modules, "torchao", torchao)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ModelError, match=words):
        Preview(ToyAdapter(), network)


@pytest.fixture
def sd3():
    return tiny.adapter()
