"""Trainable weights and their roles: LoRA or full, with policy, reference, EMA and other snapshots.

The policy lives in the network. Every other role is a named set of tensors that `using(role)` swaps in;
for LoRA the reference is the network with the adapter disabled, and costs nothing. Teachers are roles that come from
files and stay as they are: further adapters of the network, or frozen copies of its weights (teachers.py).
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from flowrl.core.errors import ModelError
from flowrl.models.base import LoraSettings, ModelAdapter, ModelConfig
from flowrl.models.lora_formats.files import component_names as component_names
from flowrl.models.lora_formats.files import lora_file as lora_file
from flowrl.models.lora_formats.files import lora_places as lora_places
from flowrl.models.lora_formats.files import read_lora as read_lora
from flowrl.models.lora_formats.start import start_from
from flowrl.models.memory.compiled import compile_blocks
from flowrl.models.memory.savings import cast_frozen
from flowrl.models.weights.lora_kinds import LABELS, adapted_modules, measure_norms, peft_config
from flowrl.models.weights.precision import ADAPTER as ADAPTER
from flowrl.models.weights.precision import autocasts, fit_network


def order_header(file: Path) -> None:
    """Sort the metadata in the header of a .safetensors, in place, so that equal weights are equal files.

    The library keeps them in a hash map, whose order differs from call to call.
    """
    with file.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        # A longer header would overwrite the tensors after it; the same content in another order is not longer.
        if len(text) > length:
            raise ValueError(f"{file}: its header would grow from {length} to {len(text)} bytes")
        stream.seek(8)
        stream.write(text.ljust(length))


def full_tensor(tensor: Tensor) -> Tensor:
    """This process's rows of a tensor that `fully_shard` has split, in the same memory; any other tensor itself."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[attr-defined]


class Weights:
    """The trainable parameters of a denoiser. They are frozen or made trainable here. `lora`: adapter settings; None:
    full fine-tuning. `targets`: module suffixes that the adapter binds to, unless `lora` names its own. `seed`: of the
    adapter's initial values.
    """

    sparse = False
    """Whether a parameter without gradient rests: no decay, unchanged moments."""

    def __init__(self, network: nn.Module, lora: LoraSettings | None, targets: tuple[str, ...], seed: int) -> None:
        self.network, self.lora = network, lora
        self.components = component_names(network)
        # `fully_shard` renames the classes of the modules it splits.
        self._classes: dict[str, Any] = {name: type(part) for name, part in self.components.items()}
        self.layers: list[Any] = []
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.teachers: dict[str, dict[str, Tensor]] = {}
        """Frozen roles from files -> their values by the names of the network's parameters; {}: an adapter of the
        role's name. No checkpoint has them."""
        if lora is None:
            network.requires_grad_(True).float()
        else:
            network.requires_grad_(False)
            self._lora_config = self._attach(lora, list(lora.targets or targets), seed)
        self.bind()
        if not self.parameters:
            raise ModelError("no trainable parameter: the adapter binds to no module")
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        if lora is not None and lora.kind == "dora":
            measure_norms(self.layers)

    def bind(self) -> None:
        """Collect the trained parameters of the network; again after it was split, which replaces them."""
        self.parameters = {name: p for name, p in self.network.named_parameters() if self._trains(name, p)}
        # This process's part of each: the parameter itself, or its rows where the trained weights are split.
        self.values = {name: full_tensor(p) for name, p in self.parameters.items()}
        self.split = any(self.values[name] is not p for name, p in self.parameters.items())

    def _trains(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter is trained: of a LoRA by the name of its adapter, whatever other adapters there are."""
        return parameter.requires_grad if self.lora is None else f".{ADAPTER}." in f"{name}."

    def adapters(self) -> list[nn.Parameter]:
        """The parameters of every adapter, trained or not."""
        return [p for name, p in self.network.named_parameters() if adapted_modules([name])]

    def adopt(self) -> None:
        """Leave the network as it was, once a frozen adapter was added: the policy is trained and active, alone."""
        named = dict(self.network.named_parameters())
        for name, parameter in named.items():
            parameter.requires_grad_(self._trains(name, parameter))
        self.layers = [self.network.get_submodule(each) for each in adapted_modules(named)]
        self._switch(on=True)
        self._activate(ADAPTER)

    def _attach(self, lora: LoraSettings, targets: list[str], seed: int) -> Any:
        from diffusers.loaders.peft import PeftAdapterMixin

        kind, adapted = type(next(iter(self.components.values()))).__name__, list[PeftAdapterMixin]()
        for network in self.components.values():
            if not isinstance(network, PeftAdapterMixin):
                raise ModelError(f"{kind} takes no LoRA in diffusers", {"model.lora": None})
            adapted.append(network)
        if not targets:
            raise ModelError(
                f"{kind} has no attention projection under the usual names: give module name suffixes in "
                "model.lora.targets"
            )
        config = peft_config(lora, targets)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                for network in adapted:
                    network.add_adapter(config, adapter_name=ADAPTER)
            except ValueError as error:
                raise ModelError(
                    f"model.lora.targets={targets} binds to no module of {kind} ({error})", {"model.lora.targets": None}
                ) from error
        names = list(adapted_modules(name for name, _ in self.network.named_parameters()))
        for target in targets:
            if not any(name == target or name.endswith(f".{target}") for name in names):
                raise ModelError(
                    f"model.lora.targets: {target!r} binds to no module of {kind}", {"model.lora.targets": None}
                )
        self._refuse_rank(lora)
        self.layers = [self.network.get_submodule(name) for name in names]
        self._switch(on=True)  # an attribute of each layer from the first forward on
        return config

    def _refuse_rank(self, lora: LoraSettings) -> None:
        """Refuse a rank that no adapted matrix can have: of A [r, in] and B [out, r] the shorter side is its most."""
        shapes = {name: p.shape for name, p in self.network.named_parameters() if f".{ADAPTER}.weight" in name}
        ups = {name: shape[0] for name, shape in shapes.items() if ".lora_B." in name}
        most = [min(up, shapes[name.replace(".lora_B.", ".lora_A.")][1:].numel()) for name, up in ups.items()]
        if most and lora.rank > max(most):
            raise ModelError(
                f"model.lora.rank={lora.rank} is above the width of every adapted matrix, {max(most)} at most: the "
                "rest would cost memory and change nothing",
                {"model.lora.rank": max(most)},
            )

    @property
    def count(self) -> int:
        """Number of trained values."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def description(self) -> str:
        """The kind of the trained weights, in words."""
        return "full weights" if self.lora is None else f"{LABELS[self.lora.kind]} rank {self.lora.rank}"

    def snapshot(self, role: str) -> None:
        """Copy the present values to `role`; a teacher needs no copy, and for LoRA 'reference' neither."""
        if role in self.teachers or (role == "reference" and self.lora is not None):
            return
        self.copies[role] = {name: value.detach().clone() for name, value in self.values.items()}

    def follow(self, role: str, decay: float) -> None:
        """role <- decay * role + (1 - decay) * policy."""
        copies = [self.copies[role][name] for name in self.values]
        get_ema_multi_avg_fn(decay)(copies, [value.detach() for value in self.values.values()], 0)

    @contextmanager
    def using(self, role: str) -> Iterator[None]:
        """The network with the values of `role` inside the block; 'policy' is the network as it is."""
        if role == "policy":
            yield
        elif role == "reference" and self.lora is not None:
            self._switch(on=False)
            try:
                yield
            finally:
                self._switch(on=True)
        elif role in self.copies:
            kept = self._exchange(self.copies[role])
            try:
                yield
            finally:
                self._exchange(kept)
        elif role in self.teachers:
            kept = self._taught(role, self.teachers[role])
            try:
                yield
            finally:
                self._taught(ADAPTER, kept)
        else:
            known = ", ".join(sorted([*self.copies, *self.teachers]))
            raise ValueError(f"role={role!r} is unknown; there are: policy, {known or 'none'}")

    def _taught(self, adapter: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put an adapter, or values in place of weights and adapters, into the network; returns the previous values."""
        self._activate(adapter)  # there is none of a copy's name: its layers then add nothing
        had = {name: p.data for name, p in self.network.named_parameters() if name in values}
        for name in had:
            self.network.get_parameter(name).data = values[name] = values[name].to(had[name].device)
        return had

    def _activate(self, adapter: str) -> None:
        """Let this adapter alone add to the layers that have it; which weights are trained stays as it is."""
        for layer in self.layers:
            layer._active_adapter = [adapter]

    def _switch(self, *, on: bool) -> None:
        """Put the LoRA into the network, or leave it out; which weights are trained stays as it is."""
        for layer in self.layers:
            layer._disable_adapters = not on

    def _exchange(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Put values into the network; returns the previous ones."""
        if self.split:
            # A forward gathers the weights from this very memory.
            had = {name: value.clone() for name, value in self.values.items()}
            for name, value in self.values.items():
                value.copy_(values[name])
            if value.device.type != "cpu":
                torch.accelerator.synchronize()  # a backward pass gathers on a stream that waits for no other
            return had
        had = {name: p.data for name, p in self.parameters.items()}
        for name, p in self.parameters.items():
            p.data = values[name]
        return had

    def gradients(self) -> list[Tensor | None]:
        """Gradients of `values`, in their order; None where the backward pass gave none."""
        return [None if p.grad is None else full_tensor(p.grad) for p in self.parameters.values()]

    def state(self) -> dict[str, Tensor]:
        """This process's part of every role under flat names, for a checkpoint."""
        tensors = {f"policy/{name}": value.detach() for name, value in self.values.items()}
        for role, copy in self.copies.items():
            tensors |= {f"{role}/{name}": value for name, value in copy.items()}
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Inverse of `state`; raises ModelError where names or shapes differ."""
        roles: dict[str, dict[str, Tensor]] = {}
        for flat, value in tensors.items():
            role, _, name = flat.partition("/")
            roles.setdefault(role, {})[name] = value
        for role, values in roles.items():
            for name, value in self.values.items():
                if name not in values or values[name].shape != value.shape:
                    result = tuple(values[name].shape) if name in values else "nothing"
                    raise ModelError(
                        f"the checkpoint's {role} weights do not fit this model: "
                        f"{name} is {tuple(value.shape)} here, {result} there"
                    )
            if role == "policy":
                for name, value in self.values.items():
                    value.data.copy_(values[name])
            else:
                self.copies[role] = {name: values[name].to(v.device).clone() for name, v in self.values.items()}

    def load_lora(self, path: str) -> None:
        """Start from a saved LoRA of the same rank, alpha and targets (`model.init_lora`), in any layout that is read.

        Raises ModelError: a file that does not fit; the network is as it was.
        """
        if self.lora is None:
            raise ModelError(
                "model.init_lora needs model.lora: full fine-tuning has no adapter to load into",
                [{"model.lora": {}}, {"model.init_lora": None}],
            )
        if self.lora.kind in ("dora", "lokr"):
            raise ModelError(
                f"model.init_lora={path!r}: files are read as a plain or rank-stabilised LoRA, and model.lora.kind is "
                f"{self.lora.kind}; merge the file into the model (flowrl export --format merged) and start from that"
            )
        start_from(path, self.components, self.lora)

    def whole(self, name: str, *, keep: bool, values: Mapping[str, Tensor] | None = None) -> Any:
        """The component with all its weights in host memory where `keep`, else None.

        Collective for a split network, which is gathered tensor by tensor. `values` by the names of parameters are
        taken in place of the network's own.
        """
        network, kind, tensors = self.components[name], self._classes[name], {}
        for key, value in network.state_dict().items():
            known = None if values is None else values.get(key if network is self.network else f"{name}.{key}")
            if known is not None:
                tensors[key] = known
                continue
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            if keep:
                tensors[key] = full.detach().cpu()
        if not keep:
            return None
        with torch.device("meta"):
            twin = kind.from_config(network.config)
        twin.load_state_dict(tensors, assign=True)
        return twin

    def save(self, folder: Path, pipeline_class: type) -> None:
        """Write files that a plain pipeline loads: a LoRA for `load_lora_weights(folder)`, or whole denoisers.

        For a pipeline without a loader (HunyuanVideo 1.5): `transformer.load_lora_adapter(folder,
        prefix="transformer", weight_name="pytorch_lora_weights.safetensors")`.
        """
        from diffusers.models.modeling_utils import ModelMixin
        from peft import get_peft_model_state_dict

        folder.mkdir(parents=True, exist_ok=True)
        if self.lora is None:
            for name, network in self.components.items():
                assert isinstance(network, ModelMixin)
                network.save_pretrained(folder / name)
            return
        # Without these metadata diffusers drops alpha, and the reloaded adapter has another scale.
        settings = self._lora_config.to_dict()
        # peft keeps module names as sets, whose order differs between processes.
        settings = {key: sorted(value) if isinstance(value, set) else value for key, value in settings.items()}
        save = getattr(pipeline_class, "save_lora_weights", None) or _save_lora_weights
        for name, network, place in lora_places(folder, self.components):
            options = {
                f"{name}_lora_layers": get_peft_model_state_dict(network, adapter_name=ADAPTER),
                f"{name}_lora_adapter_metadata": settings,
            }
            save(place, **options)
            order_header(lora_file(place))


def trainable(adapter: ModelAdapter, options: ModelConfig, seed: int) -> Weights:
    """The trained weights of an adapter by its options; made before it moves to its device.

    Raises ModelError: a LoRA that does not fit, or `model.precision=native` for full weights in half precision.
    """
    adapter.autocasts = autocasts(options, trained=True)
    weights = Weights(adapter.network, options.lora, adapter.lora_targets, seed)
    fit_network(adapter, weights.components.values(), weights.layers)
    if options.init_lora is not None:
        weights.load_lora(options.init_lora)
    # Before the device: weights stored in few bits never occupy it at their full size.
    cast_frozen(weights.components.values(), options)
    if options.compile is not None:
        compile_blocks(adapter.network)
    return weights


def freeze(adapter: ModelAdapter, options: ModelConfig, seed: int) -> None:
    """Freeze an adapter's network, with `init_lora`, before it moves. Raises ModelError: a LoRA that does not fit."""
    adapter.autocasts = autocasts(options, trained=False)
    networks, layers = component_names(adapter.network).values(), []
    if options.lora is not None and options.init_lora is not None:
        weights = Weights(adapter.network, options.lora, adapter.lora_targets, seed)
        weights.load_lora(options.init_lora)
        layers = weights.layers
    fit_network(adapter, networks, layers)
    adapter.network.requires_grad_(False)
    cast_frozen(networks, options)
    if options.compile is not None:
        compile_blocks(adapter.network)


def _save_lora_weights(folder: Path, *, transformer_lora_layers: Any, transformer_lora_adapter_metadata: Any) -> None:
    """diffusers' own layout, for pipelines without a writer."""
    from diffusers.loaders.lora_base import LoraBaseMixin

    # The public writers of other pipelines call this one.
    LoraBaseMixin._save_lora_weights(
        save_directory=folder,
        lora_layers={"transformer": transformer_lora_layers},
        lora_metadata={"transformer": transformer_lora_adapter_metadata},
    )
