"""The model card of a run: `README.md` next to its weights, with the hub's front matter.

Every number is one of the run folder; no model is loaded. Texts of users are escaped, and of paths only names remain.
"""

import re
from pathlib import Path
from typing import Any

import jinja2

from flowrl.apps.gallery import results
from flowrl.apps.gallery.facts import commit
from flowrl.apps.gallery.runs import Run, load_run
from flowrl.apps.plain_text import escaped
from flowrl.apps.publish import card_facts
from flowrl.apps.publish.card_facts import Facts
from flowrl.apps.publish.card_loading import Base, Layout, how, snippet
from flowrl.core.errors import described
from flowrl.core.files import write_atomically
from flowrl.display.console import journal, log
from flowrl.models.pipelines.classes import config_folder

FILE = "README.md"
_LIBRARIES = ("flowrl", "torch", "diffusers", "transformers", "peft", "python")
_TEMPLATE = Path(__file__).with_name("card.md.j2")


def write_card(run: Path, folder: Path, layout: Layout) -> Path:
    """Write `README.md` for the weights of a run that are in `folder`.

    Raises ConfigError: the run folder is damaged; WriteError: the disk is full or not writable.
    """
    file = folder / FILE
    write_atomically(file, card(load_run(run), folder, layout))
    return file


def try_card(run: Path, folder: Path, layout: Layout) -> Path | None:
    """As `write_card`, for weights that are safe already: a failure is told, and the card is missing (None)."""
    try:
        return write_card(run, folder, layout)
    # Whatever is wrong with a text about the weights, the weights are worth more.
    except Exception as error:
        log.warning("%s could not be written: %s; the weights are not affected", folder / FILE, described(error))
        journal.debug("its traceback", exc_info=error)
        return None


def card(run: Run, folder: Path, layout: Layout) -> str:
    """The whole text of the card: front matter, then Markdown."""
    from huggingface_hub import ModelCard

    facts = Facts.of(run)
    base = Base.of(facts)
    text = f"---\n{metadata(facts, base, layout)}\n---\n\n{_body(facts, base, layout, folder)}"
    return str(ModelCard(text, ignore_metadata_errors=False))


def metadata(facts: Facts, base: Base, layout: Layout) -> Any:
    """The front matter, a `ModelCardData`; its text is YAML."""
    from huggingface_hub import ModelCardData

    lora = facts.at("model", "lora") is not None and not facts.learned_noise
    relation = None if facts.learned_noise else "adapter" if lora and layout != "merged" else "finetune"
    words = ["lora"] if relation == "adapter" else []
    name = facts.at("algorithm", "name")
    words += [str(name).replace("_", "-")] if name else []
    words += [f"arxiv:{paper}" for paper in card_facts.method(facts)[1]]
    source = str(facts.at("data", "prompts") or "")
    scored = facts.known if facts.run.finished else []
    return ModelCardData(
        base_model=base.hub_id,
        base_model_relation=relation if base.hub_id else None,
        license=licence(base.path),
        library_name="diffusers",
        pipeline_tag=base.task,
        tags=["diffusers", "flowrl", base.task, *words],
        datasets=[source.split(":")[1]] if re.fullmatch(r"hf:[\w.-]+/[\w.-]+(:.*)?", source) else None,
        model_name=escaped(facts.run.name),
        eval_results=[_result(facts, metric, base.task) for metric in scored] or None,
    )


def _result(facts: Facts, metric: results.Metric, task: str) -> Any:
    """A metric for the hub's model index; its arguments hold the interval and what it is compared with."""
    from huggingface_hub import EvalResult

    held_out, after = facts.run.summary.get("held_out"), facts.run.after
    source = held_out.get("source") if isinstance(held_out, dict) else facts.at("data", "prompts")
    what = facts.run.subject.name
    numbers: dict[str, Any] = {}
    best = facts.at("eval", "verdict") == "best"
    for block, one in facts.estimates[metric.name].items():
        if one.known:
            numbers[block] = round(one.mean, 6)
        if one.bounded:
            numbers[f"{block}_interval_95"] = [round(one.low, 6), round(one.high, 6)]
    numbers |= {"prompts": after.num_distinct() if after else 0, "seeds": len(after.seeds) if after else 0}
    return EvalResult(
        task_type=task,
        dataset_type=what.replace(" ", "-"),
        dataset_name=f"{what}: {facts.named(str(source)).partition('=')[2] or facts.named(str(source))}",
        metric_type=metric.name,
        metric_name=metric.label,
        metric_value=numbers["tuned_best_guidance" if best and "tuned_best_guidance" in numbers else "tuned"],
        metric_args=numbers,
    )


def licence(path: str) -> str | None:
    """Licence of a base model as its own card on this disk says it, such as "apache-2.0"; None: it is not known."""
    from huggingface_hub import ModelCard, try_to_load_from_cache

    folder = config_folder(path)
    cached = None if folder is not None or path.count("/") != 1 else try_to_load_from_cache(path, FILE)
    file = folder / FILE if folder is not None else Path(cached) if isinstance(cached, str) else None
    if file is None or not file.is_file():
        return None
    try:
        text = file.read_text(encoding="utf-8")
        if text.startswith("---"):
            stated = ModelCard(text, ignore_metadata_errors=True).data.to_dict().get("license")
            return stated if isinstance(stated, str) else None
    except (OSError, ValueError):  # another's file: without a licence that can be read there is none
        return None
    told = re.search(r"Licen[cs]e: ([A-Za-z0-9.-]*[A-Za-z0-9])", text)
    return told.group(1).lower() if told else None


def _body(facts: Facts, base: Base, layout: Layout, folder: Path) -> str:
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    columns, rows = card_facts.table(facts)
    training = card_facts.training(facts)
    weights = next(text for label, text in training if label == "Trained")
    name = facts.say(facts.at("algorithm", "name") or "a method of the user's own")
    of = facts.say(base.hub_id or facts.named(base.path))
    known = {name: facts.run.provenance.get(name) for name in _LIBRARIES} | {"commit": commit(facts.run)}
    text = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=facts.say(facts.run.name),
        opening=f"{weights[:1].upper() + weights[1:]} for {of}, trained by {name} with flowrl.",
        results=rows,
        shares=any(metric.percent for metric in facts.known),
        columns=columns,
        on=card_facts.on(facts),
        verdicts=card_facts.verdicts(facts),
        facts=facts,
        of=of,
        licence=licence(base.path),
        **how(facts, base, layout, folder),
        **card_facts.limits(facts),
        snippet=snippet(facts, base, layout, folder),
        training=training,
        rewards=card_facts.rewards(facts),
        versions=", ".join(f"{name} {facts.say(it)}" for name, it in known.items() if it) or "not recorded",
    )
    return re.sub(r"\n{3,}", "\n\n", text)
