"""`flowrl doctor`: tests of a machine, a configuration, a pipeline or a component before a training."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from flowrl.core.errors import ConfigError, Fault, Remedy, described

if TYPE_CHECKING:
    from flowrl.config.resolved import Resolved
    from flowrl.scoring.entries import RewardPlan


def command(
    config: str | None = None,
    overrides: list[str] | None = None,
    model: str | None = None,
    check: str | None = None,
    guidance: float = 4.0,
) -> None:
    """Test this machine, a model or a component. It prints versions, devices, the process group.

    With CONFIG: its model and rewards too.
    With --model: what the generic adapter reads from a pipeline, and whether it reproduces the pipeline's own call.
    With --check: the laws of a component. Exit code 1 if something fails.
    """
    if check is not None and model is not None:
        raise ConfigError(
            f"--check {check} and --model {model}: each is a test of its own",
            [Remedy(without="--check"), Remedy(without="--model")],
        )
    words = [word for word in (config, *(overrides or ())) if word]
    if check is not None:
        from flowrl.contracts import checking
        from flowrl.contracts.laws import ContractError
        from flowrl.core.strict import overridden

        try:
            findings, good = checking.check(check, **overridden({}, words)), True
        except ContractError as error:
            findings, good = error.findings, False
        print(*findings, sep="\n")
        raise SystemExit(0 if good else 1)
    if model is not None:
        raise SystemExit(0 if _pipeline(model, words, guidance) else 1)
    if config is not None:
        from flowrl.config.load import load_config, resolve

        run = load_config(config, overrides)
    failed = not _report("torchvision's compiled part", _torchvision)
    for line in _facts():
        print(line)
    failed |= not _report("two processes over gloo", _two_processes)
    if config is not None:
        resolved = resolve(run)
        plans = resolved.rewards + resolved.eval_rewards
        for place, plan in enumerate(plans):
            if any(plan.same_component(earlier) for earlier in plans[:place]):
                continue
            failed |= not _report(f"reward {plan.name}", lambda plan=plan: _probe(plan, resolved))
        failed |= not _report(f"model {resolved.model.config.path}", lambda: _model(resolved))
    raise SystemExit(1 if failed else 0)


def _model(resolved: "Resolved") -> str:
    """Place of the model, and what its JSON files say if they are on this machine."""
    from flowrl.commands._model_check import place_of
    from flowrl.commands.plan import outline
    from flowrl.config.checks import check_model

    place, (adapter, reason) = place_of(resolved.model.config), outline(resolved)
    notes = [reason] if adapter is None else check_model(resolved, adapter)
    return "; ".join([place, f"adapter {resolved.model.name}", *notes])


def _report(what: str, check: Callable[[], str]) -> bool:
    """Print one line about a test; True if it passed."""
    try:
        print(f"ok    {what}: {check()}")
    except (Exception, SystemExit) as error:  # the whole point is to name whatever goes wrong
        print(f"FAIL  {what}: {error if isinstance(error, Fault) else described(error)}")
        return False
    return True


def _facts() -> list[str]:
    import torch

    from flowrl.config.trackers import known
    from flowrl.core.versions import versions
    from flowrl.training.world import unused_accelerator

    lines = [f"      {name} {version}" for name, version in versions().items()]
    there = [f"{name}{'' if ready else ' (not installed)'}" for name, ready in known().items()]
    lines.append(f"      trackers: {', '.join(there)}")
    lines.append(f"      {os.cpu_count()} cores, {torch.get_num_threads()} threads per process")
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(i)
            lines.append(f"      GPU {i}: {facts.name}, {facts.total_memory / 2**30:.0f} GiB")
    else:
        lines.append(f"      {unused_accelerator() or 'no GPU: training runs on the CPU'}")
    return lines


def _torchvision() -> str:
    import torch
    import torchvision

    boxes, scores = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1)
    torchvision.ops.nms(boxes, scores, 0.5)
    return f"torch {torch.__version__} with torchvision {torchvision.__version__}"


def _two_processes() -> str:
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


def _probe(plan: "RewardPlan", resolved: "Resolved") -> str:
    """Scores of a reward on random images with the run's first prompts."""
    from flowrl.evaluation.held_out import run_prompts
    from flowrl.scoring.probing import PX, probe_batch, try_reward
    from flowrl.scoring.surroundings import Conduct

    if plan.by_people:
        return "people judge, once the run asks them: flowrl vote RUN"
    if plan.on_latents:
        plan.build()
        return "it is built; it judges the model's latents, on which the run tries it before it trains"
    result = run_prompts(resolved.run, resolved.training.own_prompts)
    prompts = (result.train or result.evaluated)[:2]  # given pairs bring no prompts
    batch = probe_batch(prompts, PX, PX, resolved.model.config.frames)
    scores = try_reward(plan.build(), batch, Conduct())
    return ", ".join(f"{name} {value.tolist()}" for name, value in scores.items())


def _pipeline(path: str, words: list[str], guidance_scale: float) -> bool:
    """Print what the generic adapter reads from a pipeline, then compare it with the pipeline's own call."""
    import torch

    from flowrl.core.strict import overridden, validate
    from flowrl.models import generic
    from flowrl.planning import parity

    adapter = generic.build(validate(generic.Config, overridden({"path": path}, words), "model"))
    adapter.to(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for what, value in parity.facts(adapter):
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
