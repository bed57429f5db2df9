"""`flowrl doctor`: is this machine, and is this configuration, fit to train?"""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    config: Annotated[str | None, typer.Argument(help="YAML file whose rewards and model are tried.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c words.")] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A pipeline to look at instead; then the words are of its Config.")
    ] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", help="A sampler, method or reward: its file or name; the words are of its Config."),
    ] = None,
    guidance: Annotated[float, typer.Option("--guidance", help="Scale for the comparisons with --model.")] = 4.0,
) -> None:
    """Versions, devices, process group; with CONFIG its rewards on a probe batch. Exit code 1 if something fails.

    With --model PATH: what the generic adapter finds in that pipeline, and whether it reproduces its own call.
    With --check FILE: the laws of that component, each tried on it.
    """
    if check is not None:
        raise SystemExit(0 if _laws(check, [w for w in (config, *(overrides or ())) if w]) else 1)
    if model is not None:
        raise SystemExit(0 if _pipeline(model, [w for w in (config, *(overrides or ())) if w], guidance) else 1)
    failed = not _report("torchvision's compiled part", _torchvision)
    for line in _facts():
        print(line)
    failed |= not _report("two processes over gloo", _two_processes)
    if config is not None:
        from flowrl.config.load import load_config, resolve

        resolved = resolve(load_config(config, overrides))
        plans = resolved.rewards + resolved.eval_rewards
        for place, plan in enumerate(plans):
            if any(plan.same_component(earlier) for earlier in plans[:place]):
                continue
            failed |= not _report(f"reward {plan.name}", lambda plan=plan: _probe(plan, resolved))
        failed |= not _report(f"model {resolved.model.config.path}", lambda: _model(resolved))
    raise SystemExit(1 if failed else 0)


def _laws(component: str, words: list[str]) -> bool:
    """Try a component's laws and print what came out; whether they hold."""
    from flowrl.contracts.checking import check
    from flowrl.contracts.laws import ContractError
    from flowrl.core.strict import apply_override

    options: dict = {}
    for word in words:
        apply_override(options, word)
    try:
        result, good = check(component, **options), True
    except ContractError as error:
        result, good = error.findings, False
    print(*result, sep="\n")
    return good


def _model(resolved) -> str:
    """Where it is, and what its JSON files tell, where they are here."""
    from flowrl.commands._model_check import place_of
    from flowrl.config.checks import check_model
    from flowrl.planning.memory import UnknownModel, skeleton

    place = place_of(resolved.model.config)
    try:
        notes = check_model(resolved, skeleton(resolved))
    except UnknownModel as error:
        return f"{place}; adapter {resolved.model.name}; {error}"
    return "; ".join([place, f"adapter {resolved.model.name}", *notes])


def _report(what: str, check) -> bool:
    from flowrl.core.errors import Fault, described

    try:
        print(f"ok    {what}: {check()}")
    except (Exception, SystemExit) as error:  # the whole point is to name whatever goes wrong
        told = error if isinstance(error, Fault) else described(error)
        print(f"FAIL  {what}: {told}")
        return False
    return True


def _facts() -> list[str]:
    import os

    import torch

    from flowrl.core.versions import versions

    lines = [f"      {name} {version}" for name, version in versions().items()]
    lines.append(f"      {os.cpu_count()} cores, {torch.get_num_threads()} threads per process")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(i)
            lines.append(f"      GPU {i}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    else:
        lines.append("      no GPU: training runs on the CPU")
    return lines


def _torchvision() -> str:
    import torch
    import torchvision

    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1)
    torchvision.ops.nms(boxes, scores, 0.5)
    return f"torch {torch.__version__} with torchvision {torchvision.__version__}"


def _two_processes() -> str:
    import subprocess
    import sys

    from flowrl.run.launch import free_port

    code = (
        "import torch, torch.distributed as d, sys; r = int(sys.argv[1]);"
        "d.init_process_group('gloo', init_method='tcp://127.0.0.1:' + sys.argv[2], rank=r, world_size=2);"
        "t = torch.ones(1); d.all_reduce(t); assert t.item() == 2; d.destroy_process_group()"
    )
    port = str(free_port())
    children = [subprocess.Popen([sys.executable, "-P", "-c", code, str(rank), port]) for rank in range(2)]
    codes = [child.wait(timeout=60) for child in children]
    if any(codes):
        raise RuntimeError(f"exit codes {codes}")
    return "all-reduce works"


def _probe(plan, resolved) -> str:
    from flowrl.evaluation.held_out import run_prompts
    from flowrl.scoring.build import PROBE_PX, probe_batch
    from flowrl.scoring.one_call import score_once

    result = run_prompts(resolved.run, resolved.training.own_prompts)
    prompts = (result.train or result.evaluated)[:2]  # given pairs bring no prompts
    texts, metadata = [p.text for p in prompts], [p.metadata for p in prompts]
    images = probe_batch(len(prompts), PROBE_PX, PROBE_PX, resolved.model.config.frames)
    scores = score_once(plan.build(), images, texts, metadata)
    return ", ".join(f"{name} {value.tolist()}" for name, value in scores.items())


def _pipeline(path: str, words: list[str], guidance_scale: float) -> bool:
    """Print what the generic adapter finds in a pipeline, then compare it with the pipeline's own call."""
    import torch

    from flowrl.core.strict import apply_override, validate
    from flowrl.models import generic
    from flowrl.planning import parity

    tree = {"path": path}
    for word in words:
        apply_override(tree, word)
    adapter = generic.build(validate(generic.Config, tree, "model"))
    adapter.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for what, value in parity.found(adapter):
        print(f"      {what}: {value}")
    limit, good = parity.TOLERANCE[adapter.dtype], True
    for what, error in parity.checks(adapter, guidance_scale):
        good &= error <= limit
        print(f"{'ok   ' if error <= limit else 'FAIL '} {what}: differs by {error:.1e} (limit {limit:.0e})")
    count, still = parity.untrained(adapter, guidance_scale)
    dead = f"; declared dead: {', '.join(adapter.dead_lora_modules()) or 'none'}"
    print(f"{'FAIL ' if still else 'ok   '} LoRA: {count} modules{dead}")
    for name in still:
        print(f"      no gradient: {name}")
    return good and not still
