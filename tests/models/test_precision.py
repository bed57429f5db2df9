"""A denoiser in half precision: its own dtype, as its pipeline runs, or torch.autocast; LoRA as one addmm."""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from flowrl.core.errors import ConfigError, ModelError
from flowrl.core.strict import validate
from flowrl.models import generic, sd3
from flowrl.models.base import LoraSettings
from flowrl.models.weights import roles as weights
from flowrl.models.weights.precision import join_products
from tests import native, tiny_sd3
from tests import tiny_pipelines as tiny
from tests.like_cuda import cuda_autocast

HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
LORA = LoraSettings(rank=4, alpha=10)
SLOW = pytest.mark.slow
NATIVES = ["sd", "sd3", "flux", "qwen_image", "wan", pytest.param("sdxl", marks=SLOW)]


# ---- a LoRA layer


def layers(bias: bool, base: nn.Module | None = None) -> tuple[Any, Any]:
    """The same LoRA on a layer twice: peft's own, and with the joined product; B is not zero."""
    torch.manual_seed(0)
    holder = nn.ModuleDict({"one": base or nn.Linear(6, 5, bias=bias)}).requires_grad_(False)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=["one"], init_lora_weights="gaussian")
    plain = inject_adapter_in_model(config, holder).get_submodule("one")
    assert isinstance(plain, LoraLayer)
    nn.init.normal_(plain.lora_B["default"].weight)  # type: ignore[arg-type]
    joined = copy.deepcopy(plain)
    join_products([joined])
    return plain, joined


@pytest.mark.parametrize("shape", [(6,), (4, 6), (2, 3, 6), (2, 3, 2, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_joined_product_is_pefts_layer_with_its_gradients(shape, bias):
    both = layers(bias)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    outputs, gradients = [], []
    for layer in both:
        given = x.clone().requires_grad_()
        output = layer(given)
        output.square().sum().backward()
        outputs.append(output.detach())
        gradients.append([given.grad, *(p.grad for _, p in sorted(layer.named_parameters()) if p.requires_grad)])
    assert outputs[0].shape == outputs[1].shape == (*shape[:-1], 5)
    assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert len(gradients[0]) == 3
    for own, theirs in zip(*gradients, strict=True):
        assert_close(own, theirs, atol=1e-4, rtol=1e-5)
    assert [name for name, _ in both[0].named_parameters()] == [name for name, _ in both[1].named_parameters()]


def test_inputs_that_are_not_contiguous_give_the_same():
    _, joined = layers(True)
    x = torch.randn(6, 4, 3).permute(2, 1, 0)
    assert_close(joined(x), joined(x.contiguous()))


@pytest.mark.parametrize("dtype", HALF.values())
def test_masters_stay_float32_and_get_their_gradient_through_the_cast(dtype):
    """The output has the type of the frozen layer; the gradient is the exact one up to the rounding of that type."""
    plain, joined = layers(True)
    joined.base_layer.to(dtype)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    output = joined(x.to(dtype))
    assert output.dtype == dtype
    output.float().square().sum().backward()
    plain(x).square().sum().backward()
    eps = torch.finfo(dtype).eps
    for (name, mine), (_, exact) in zip(joined.named_parameters(), plain.named_parameters(), strict=True):
        if mine.requires_grad:
            assert mine.dtype == mine.grad.dtype == torch.float32, name
            # Inputs, weights, output and both products are rounded: a few eps, and sums of 8 terms that cancel.
            assert_close(mine.grad, exact.grad, atol=16 * eps * float(exact.grad.abs().max()), rtol=0)


class Viewed(torch.autograd.Function):
    """A product that comes back as a view, as a kernel of a library may make it: nothing may write into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return (x @ weight.t())[:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.saved_tensors[0], None


class Library(nn.Linear):
    """Its forward is a library's own."""

    def forward(self, input: Tensor) -> Tensor:
        output = Viewed.apply(input, self.weight)
        assert isinstance(output, Tensor)
        return output


def test_the_output_of_a_librarys_linear_layer_is_not_written_to():
    plain, joined = layers(False, Library(6, 5, bias=False))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    outputs = [layer(x.clone().requires_grad_()) for layer in (plain, joined)]
    assert_close(*outputs, atol=1e-5, rtol=1e-5)
    for output in outputs:
        output.square().sum().backward()
    assert_close(joined.lora_A["default"].weight.grad, plain.lora_A["default"].weight.grad, atol=1e-4, rtol=1e-5)


def test_a_convolution_keeps_pefts_forward_and_its_type():
    plain, joined = layers(True, nn.Conv2d(6, 5, 3))
    assert type(joined) is type(plain)
    joined.base_layer.bfloat16()
    output = joined(torch.randn(1, 6, 4, 4).bfloat16())
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert joined.lora_A["default"].weight.grad.dtype == torch.float32


@pytest.mark.slow
def test_it_compiles_whole_and_once_for_each_state_of_the_switch():
    """No graph break; layers of one shape share a graph, and going back and forth makes no further one."""
    pairs = [layers(True)[1] for _ in range(3)]
    frames = []

    def counted(graph: Any, _: Any) -> Any:
        frames.append(graph)
        return graph.forward

    torch._dynamo.reset()
    forward = torch.compile(type(pairs[0]).forward, backend=counted, fullgraph=True)
    x = torch.randn(2, 3, 6)
    for _ in range(2):
        for off in (False, True):
            for layer in pairs:
                layer._disable_adapters = off
                assert_close(forward(layer, x), layer(x))
    assert len(frames) == 2
    torch._dynamo.reset()


# ---- the switch


def test_the_reference_leaves_what_is_trained_alone_and_comes_back_after_an_error():
    model = tiny_sd3.adapter(lora=LORA)
    trained = tiny_sd3.lora(model, noise=0.1)
    moved, had = tiny_sd3.output(model, 3.0), [p.requires_grad for p in model.network.parameters()]
    with trained.using("reference"):
        assert [p.requires_grad for p in model.network.parameters()] == had
        base = tiny_sd3.output(model, 3.0)
    assert not torch.allclose(base, moved, atol=1e-3)
    with pytest.raises(RuntimeError, match="in between"), trained.using("reference"):
        raise RuntimeError("in between")
    assert torch.equal(tiny_sd3.output(model, 3.0), moved)


def test_a_policys_graph_outlives_the_reference():
    """The backward pass after the reference's forward gives the gradient that it gives without one."""
    gradients = []
    for between in (False, True):
        model = tiny_sd3.adapter(lora=LORA)
        trained = tiny_sd3.lora(model, noise=0.1)
        x, timestep, cond = native.point(model)
        output = model.predict(x, timestep, cond, 3.0)
        if between:
            with torch.no_grad(), trained.using("reference"):
                model.predict(x, timestep, cond, 3.0)
        output.square().sum().backward()
        gradients.append({name: p.grad for name, p in trained.parameters.items() if p.grad is not None})
    assert set(gradients[0]) == set(gradients[1])
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


# ---- whole networks


def lowered(pipe: Any, dtype: torch.dtype) -> Any:
    """The pipeline as `from_pretrained` loads it in that dtype: with the parts that diffusers keeps in float32."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and name != "vae":
            nn.Module.to(part, dtype)
            kept = getattr(part, "_keep_in_fp32_modules", None) or ()
            for key, p in part.named_parameters():
                if any(word in kept for word in key.split(".")):
                    p.data = p.data.float()
    return pipe


def first_output(network: nn.Module, work: Any) -> Tensor:
    """The output of the network's first forward in `work`."""
    seen: list[Tensor] = []
    handle = network.register_forward_hook(lambda *args: seen.append(args[2][0]))
    with torch.no_grad():
        work()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("name", NATIVES)
def test_native_is_the_pipelines_own_forward_and_near_the_float32_network(name, dtype):
    """The first step starts at a timestep that half precision holds: bit for bit the same."""
    kind = native.KINDS[name]
    size, scale = kind.sizes[0], 3.5 if name == "flux" else 1.0
    exact = native.output(native.kind(name)[0], scale)
    model = native.adapter(kind.family, lowered(tiny.make(kind.case), HALF[dtype]), size, dtype=dtype, **kind.options)
    mine = native.output(model, scale)
    assert mine.dtype == HALF[dtype]
    eps = torch.finfo(HALF[dtype]).eps
    assert_close(mine.float(), exact, atol=12 * eps * float(exact.abs().max()), rtol=0)
    pipe = lowered(tiny.make(kind.case), HALF[dtype])
    noise = torch.randn(2, *model.latent_shape(), generator=torch.Generator().manual_seed(5)).to(HALF[dtype])
    call = model.own_call(2, scale) | {"output_type": "latent"}
    pipe.scheduler = model.pipeline.scheduler
    network = pipe.unet if name in ("sd", "sdxl") else pipe.transformer
    theirs = first_output(network, lambda: native.own_call(pipe, size, noise, 2, **call))
    start = model.schedule(2).timesteps[:1].expand(2)
    cond = model.encode(native.PROMPTS)
    ours = first_output(model.network, lambda: model.predict(noise, start, cond, scale))
    assert torch.equal(ours, theirs)


class Attention:
    """The types of queries, keys and values of every call of torch's attention."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[set[torch.dtype]] = []
        plain = F.scaled_dot_product_attention

        def noting(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.seen.append({query.dtype, key.dtype, value.dtype})
            return plain(query, key, value, *args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", noting)


@pytest.mark.parametrize("precision", ["native", "autocast"])
@pytest.mark.parametrize("name", ["sd3", "flux", "wan", *(pytest.param(n, marks=SLOW) for n in ("sd", "qwen_image"))])
def test_queries_keys_and_values_have_one_type_under_cudas_rules(name, precision, monkeypatch):
    kind = native.KINDS[name]
    pipe = lowered(tiny.make(kind.case), torch.bfloat16)
    options = {"dtype": "bfloat16", "precision": precision, "lora": LORA, **kind.options}
    model = native.adapter(kind.family, pipe, kind.sizes[0], **options)
    trained = weights.trainable(model, model.config, seed=0)
    assert {p.dtype for p in trained.parameters.values()} == {torch.float32}
    attention = Attention(monkeypatch)
    x, timestep, cond = native.point(model)
    attention.seen.clear()  # text encoders have their own
    with cuda_autocast():
        output = model.predict(x, timestep, cond, kind.scale)
    output.float().square().sum().backward()
    assert attention.seen
    assert set(map(frozenset, attention.seen)) == {frozenset({torch.bfloat16})}
    gradients = [p.grad for p in trained.parameters.values() if p.grad is not None]
    assert all(bool(g.isfinite().all()) and g.dtype == torch.float32 for g in gradients)


GENERIC = [
    name if name in ("flux", "sana") else pytest.param(name, marks=SLOW)
    for name in tiny.CASES
    if name != "pixart_sigma"  # takes no LoRA in diffusers
]


@pytest.mark.parametrize("name", GENERIC)
def test_the_generic_adapter_enters_every_pipeline_without_autocast(name):
    """Its LoRA trains in bfloat16 as under autocast: the gradients point the same way."""
    case, found = tiny.CASES[name], []
    for precision in ("native", "autocast"):
        size = case.sizes[0]
        options = {"path": "tiny", "height": size[0], "width": size[1], "call": dict(case.call), "dtype": "bfloat16"}
        config = generic.Config(**options, precision=precision, lora=LORA)
        model = generic.Generic(lowered(tiny.make(name), torch.bfloat16), config)
        trained = weights.trainable(model, config, seed=0)
        torch.manual_seed(2)
        for key, p in trained.parameters.items():
            if "lora_B" in key:
                p.data = 0.1 * torch.randn_like(p)
        x = torch.randn(1, *model.latent_shape(), generator=torch.Generator().manual_seed(3))
        cond, start = model.encode(tiny.PROMPTS[:1]), model.schedule(4).timesteps[1:2]
        output = model.predict(x, start, cond, 3.0).float()
        (output * torch.linspace(-1, 1, output.numel()).reshape(output.shape)).sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in trained.parameters.values() if p.grad is not None]))
    assert torch.cosine_similarity(*found, dim=0) > 0.95


# ---- the choice


def test_full_weights_in_half_precision_keep_autocast(tmp_path):
    folder = tiny_sd3.save(tmp_path)
    options = {"path": str(folder), "max_sequence_length": tiny.TOKENS}
    model = sd3.build(sd3.Config(dtype="bfloat16", **options))
    trained = weights.trainable(model, model.config, seed=0)
    assert model.autocasts
    assert {p.dtype for p in trained.parameters.values()} == {torch.float32}
    assert tiny_sd3.output(model).isfinite().all()
    config = sd3.Config(dtype="bfloat16", precision="native", **options)
    with pytest.raises(ModelError, match=r"model\.precision=native with model\.dtype=bfloat16 and model\.lora=null"):
        weights.trainable(sd3.build(config), config, seed=0)


@pytest.mark.parametrize(
    ("options", "autocasts"),
    [
        ({}, False),
        ({"dtype": "bfloat16", "lora": LORA}, False),
        ({"dtype": "bfloat16", "lora": LORA, "precision": "autocast"}, True),
        ({"lora": LORA, "precision": "autocast"}, True),
    ],
)
def test_the_choice_is_the_configurations(options, autocasts):
    """In float32 too: `autocast` is peft's own LoRA layers."""
    model = tiny_sd3.adapter(**options)
    trained = weights.trainable(model, model.config, seed=0)
    assert model.autocasts is autocasts
    assert all(("weights.precision" in type(layer).forward.__module__) is not autocasts for layer in trained.layers)


def test_a_frozen_network_runs_in_its_own_type():
    model = tiny_sd3.adapter(lowered(tiny_sd3.pipeline(), torch.bfloat16), dtype="bfloat16")
    weights.freeze(model, model.config, seed=0)
    assert not model.autocasts
    assert tiny_sd3.output(model, 3.0).dtype == torch.bfloat16


def test_an_unknown_precision_is_refused():
    with pytest.raises(ConfigError, match="precision = 'half'"):
        validate(sd3.Config, {"path": "tiny", "precision": "half"}, "model")
