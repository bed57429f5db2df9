"""What the rewards say of the teachers before the first iteration: each on its own domain, and on those of the others.

A teacher that is no better than the base on its own domain has nothing to teach there, at the guidance and steps of
this run. Where each is better on the domains of the others too, they do not disagree, and one set of merged weights may
do what the student is trained for.
"""

from collections.abc import Mapping
from dataclasses import replace

from flowrl.algorithms.base import StateMethod
from flowrl.core.rng import derive
from flowrl.data.prompts import Prompt
from flowrl.display.console import log
from flowrl.display.phases import phase
from flowrl.evaluation.evaluator import Setting
from flowrl.evaluation.results import Evaluation
from flowrl.evaluation.statistics import difference, format_interval
from flowrl.run.session import Session


def compare_teachers(session: Session) -> None:
    """Log what each teacher gains over the base on every domain, and warn of what makes distillation pointless.

    Raises as `Session.evaluate`.
    """
    method, evaluator = session.method, session.parts.evaluator
    if not isinstance(method, StateMethod) or not method.teaching.compared or not method.teaching.paths:
        return
    if evaluator.scorer is None or not evaluator.prompts:
        log.warning("nothing judges the teachers: give eval.rewards, and data.eval_prompts with a domain each")
        return
    teaching, gains = method.teaching, dict[str, dict[str, dict[str, float]]]()
    scale = session.config.rollout.guidance_scale if teaching.guidance is None else teaching.guidance
    cards = [entry.reward.card for entry in evaluator.scorer.entries]
    signs = {name: 1 if card.prefers_more(name) else -1 for card in cards for name in card.outputs}
    several = len(teaching.domains) > 1
    for domain in teaching.domains:
        alike = (p for p in evaluator.prompts if not several or p.metadata.get("domain") == domain)
        own = tuple(alike)[: teaching.compared]
        if not own:
            log.warning("no evaluated prompt is of the domain %s, so its teacher is not compared with the base", domain)
            continue
        # At the start weights that are all trained are the base; a LoRA may have begun elsewhere.
        base = _drawn(session, own, "policy" if session.weights.lora is None else "reference", scale)
        gains[domain] = {}
        for name, role in teaching.domains.items():
            if role in teaching.paths:
                found = difference(base, _drawn(session, own, role, scale))
                told = "; ".join(f"{m} {d['mean']:+.3f}, {format_interval(d, '+.3f')}" for m, d in found.items())
                log.info("the teacher of %s less the base on %d prompts of %s: %s", name, len(own), domain, told)
                gains[domain][name] = {metric: signs[metric] * d["mean"] for metric, d in found.items()}
    for text in verdicts(gains):
        log.warning("%s", text)


def verdicts(gains: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Warnings about teachers that do not beat the base on their own domain, or agree with each other.

    `gains`: domain -> teacher -> metric -> mean rise over the base, positive where it is better.

    >>> verdicts({"a": {"a": {"x": 0.1}, "b": {"x": -0.1}}, "b": {"a": {"x": 0.0}, "b": {"x": 0.2}}})
    []
    """
    result, won = [], {d: {m for m, gain in of.get(d, {}).items() if gain > 0} for d, of in gains.items()}
    for domain in gains:
        if domain in gains[domain] and not won[domain]:
            result.append(
                f"the teacher of {domain} is no better than the base on its own prompts by any reward, at this "
                "guidance and these steps: there is nothing to learn from it; give algorithm.teacher_guidance and "
                "eval.num_inference_steps as it was trained with, or another teacher"
            )
    others = [(d, of[name]) for d, of in gains.items() for name in of if name != d and won[d]]
    if others and all(all(found[metric] > 0 for metric in won[d]) for d, found in others):
        result.append(
            "every teacher beats the base on the prompts of the others too, so they do not disagree, and their merged "
            "weights may do as well as a student (docs/algorithms/opd.md)"
        )
    return result


def _drawn(session: Session, prompts: tuple[Prompt, ...], role: str, guidance: float) -> Evaluation:
    """Scores under a role, at the teachers' guidance and with other noise than the evaluations of the run."""
    whole = session.parts.evaluator
    options = replace(whole.options, save_images=0, diversity=0)
    own = replace(whole, prompts=prompts, folder=None, options=options, seed=derive(0, "teachers"), sources=None)
    with phase("evaluation"), session.weights.using(role):
        return own(Setting(role, 0, guidance, session.eval_steps, save=False), stop=session.stop)
