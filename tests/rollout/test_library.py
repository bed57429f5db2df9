"""A model on its own: `flowrl.load_model`."""

import pytest
import torch
from torch.testing import assert_close

import flowrl
from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.types import SampleId
from flowrl.diffusion.process import expand
from flowrl.rollout.noise import Noise

PROMPTS = ["a small red circle", "a large blue square"]


@pytest.fixture(scope="module", params=["tiny-sd3", "tiny-sd"], ids=["flow", "vp"])
def model(request):
    return flowrl.load_model(request.param, device="cpu")


def noisy(model, count: int = 2) -> torch.Tensor:
    return torch.randn(count, *model.latent_shape, generator=torch.Generator().manual_seed(0))


def test_the_adapter_is_the_native_one_of_the_class_unless_another_is_named():
    assert type(flowrl.load_model("tiny-sd3").adapter).__name__ == "Sd3"
    assert type(flowrl.load_model("tiny-sd3", name="generic").adapter).__name__ == "Generic"


@torch.no_grad()
@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_steps_made_of_denoise_alone_give_the_sample_of_the_one_loop(model, scale):
    """x' = alpha' x0_hat + sigma' eps_hat is DDIM, and on a flow the Euler step."""
    steps, process = 6, model.adapter.process
    grid = model.adapter.schedule(steps)
    start = Noise(3, "sample", None, model.latent_shape).initial
    x = start([SampleId(slot, 0) for slot in range(2)])
    for sigma, after in zip(grid.sigmas[:-1], grid.sigmas[1:], strict=True):
        now, then = sigma.expand(2), after.expand(2)
        x0 = model.denoise(x, sigma, PROMPTS, scale)
        eps = (x - expand(process.alpha(now), x) * x0) / expand(now, x)
        x = expand(process.alpha(then), x) * x0 + expand(then, x) * eps
    found = model.sample(PROMPTS, seed=3, num_inference_steps=steps, guidance_scale=scale)
    assert_close(model.adapter.decode(x), found, atol=2e-3, rtol=0)
    assert found.shape == (2, 3, 32, 32)
    assert bool(((found >= 0) & (found <= 1)).all())


@torch.no_grad()
def test_prompts_sigmas_and_batches_are_each_samples_own(model):
    x, sigma = noisy(model), torch.tensor([0.9, 0.4])
    together = model.denoise(x, sigma, PROMPTS)
    for k in range(2):
        assert_close(
            model.denoise(x[k : k + 1], float(sigma[k]), PROMPTS[k]), together[k : k + 1], atol=1e-4, rtol=1e-4
        )
    assert not torch.allclose(model.denoise(x, sigma, PROMPTS[::-1]), together, atol=1e-4)
    parts = model.sample(PROMPTS, num_inference_steps=2, batch_size=1)
    assert_close(parts, model.sample(PROMPTS, num_inference_steps=2), atol=1e-4, rtol=0)
    assert not torch.equal(parts, model.sample(PROMPTS, seed=1, num_inference_steps=2))


@torch.no_grad()
def test_little_noise_is_taken_away(model):
    """Near data the estimate is near it: the sign and the scale of the convention."""
    clean = noisy(model)
    x = model.adapter.process.add_noise(clean, torch.randn_like(clean), torch.full((2,), 0.02))
    assert float((model.denoise(x, 0.02, PROMPTS) - clean).abs().mean()) < 0.2


def test_the_estimate_has_a_gradient_to_the_trainable_weights_and_no_text_is_encoded_twice(monkeypatch):
    model = flowrl.load_model("tiny-sd3", lora={"rank": 2}, device="cpu")
    encode, asked = model.adapter.encode, []
    monkeypatch.setattr(model.adapter, "encode", lambda texts: asked.extend(texts) or encode(texts))
    for _ in range(2):
        model.denoise(noisy(model), 0.5, PROMPTS[0]).square().sum().backward()
    assert asked == PROMPTS[:1]
    assert all("lora" in name for name in model.weights.parameters)
    assert any(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.weights.parameters.values())


def test_what_cannot_be_meant_is_refused_with_the_remedy(model):
    x = noisy(model)
    for sigma in (0.0, 1.5, torch.tensor([0.5, -0.1])):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\]"):
            model.denoise(x, sigma, PROMPTS)
    with pytest.raises(ValueError, match="1 prompts for 2 latents"):
        model.denoise(x, 0.5, PROMPTS[:1])
    with pytest.raises(ConfigError, match=r"model\.lorra: unknown key .*did you mean 'lora'"):
        flowrl.load_model("tiny-sd3", lorra={})
    with pytest.raises(ModelError, match="no such file, folder or embedded asset"):
        flowrl.load_model("./nowhere")


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ("a", {"num_inference_steps": 0}, "num_inference_steps=0 must be positive"),
        ("a", {"batch_size": -1}, "batch_size=-1 must be positive"),
        ("a", {"guidance_scale": float("nan")}, "guidance_scale=nan must be a finite number"),
    ],
)
def test_a_sample_of_nothing_is_refused_by_the_argument(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        model.sample(prompts, **options)
