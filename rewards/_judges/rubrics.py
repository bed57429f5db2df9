"""Rubrics: what a judge is asked and how its answer is read, one YAML file each. A helper, not a reward."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from flowrl.rewards._judges.base import read_text, strict_fields
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from flowrl.reward import RewardError

FOLDER = Path(__file__).resolve().parents[1] / "rubrics"
_STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)
_ENDINGS = {
    "yes_no": "Answer with Yes or No.",
    "expectation": "Answer with a single digit from 0 (not at all) to 5 (perfectly).",
    "pairwise": "The first picture is A, the second picture is B. Answer with the letter A or B.",
}
# A heading of an axis: its number and name, or its name alone on a line, perhaps with a remark in brackets.
_HEADING = r"[^\w\n]*(?:\d+[.)][^\w\n]*({0})\b|({0})\s*(?:\([^()\n]*\))?[^\w\n]*$)"
_SCORE = re.compile(r"[^\w\n]*score[^\w\n]*?:(.*)", re.I)
_GRADE = re.compile(r"(?:n/?a|[-+]?\d+(?:\.\d+)?)", re.I)
_SUMMARY = re.compile(r"^[^\w\n]*#\W*summary\b", re.I | re.M)


def _title(axis: str) -> str:
    return axis.replace("_", " ").title()


class Axis(BaseModel):
    """One thing that a rubric of scale `score` or `written` gives a number to."""

    model_config = _STRICT

    about: str = Field(min_length=1)
    """Meaning of the number, shown to the judge."""
    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Share in the score; the score is the weighted mean."""


class Rubric(BaseModel):
    """A question with its scale; `{prompt}` stands for the prompt of the sample, `{name}` for a field of its record."""

    model_config = _STRICT

    scale: Literal["yes_no", "expectation", "score", "written", "pairwise"]
    question: str = Field(min_length=1)
    fields: list[str] = []
    """Keys of a sample's record that the question shows, each in its place `{key}`."""
    defaults: dict[str, str] = {}
    """Text of a field where a record lacks it."""
    source: bool = False
    """The judge sees the image that was edited, and then the result."""
    axes: dict[str, Axis] = {}
    """Axes of the scales `score` and `written` by name."""
    low: float = Field(default=1.0, allow_inf_nan=False)
    high: float = Field(default=5.0, allow_inf_nan=False)
    """Range of every axis of these."""
    whole: bool = False
    """For scale `score`: the numbers are whole."""
    reasons: bool = False
    """For scale `score`: the judge writes its reasons before the numbers; slower."""
    ending: bool = True
    """Append the form of the answer to the question; false: it says the form itself, as a tuned judge's own does."""

    @model_validator(mode="after")
    def _fits_its_scale(self) -> Rubric:
        absent = next((key for key in self.fields if f"{{{key}}}" not in self.question), None)
        if absent is not None or "prompt" in self.fields:
            raise ValueError(f"fields: the question has no place {{{absent or 'prompt'}}} for a field of that name")
        if set(self.defaults) - set(self.fields):
            raise ValueError(f"defaults: {min(set(self.defaults) - set(self.fields))} is not among fields")
        if self.source and self.scale == "pairwise":
            raise ValueError("source belongs to scales that show one result, not to scale: pairwise")
        numbers = {"score": {"axes", "low", "high", "whole", "reasons"}, "written": {"axes", "low", "high"}}
        own = self.model_fields_set & (numbers["score"] - numbers.get(self.scale, set()))
        if own:
            raise ValueError(f"{', '.join(sorted(own))} belong to scale: score, not to scale: {self.scale}")
        if self.scale not in numbers:
            return self
        if not self.axes or not sum(axis.weight for axis in self.axes.values()):
            raise ValueError(f"scale: {self.scale} needs axes, one of them with a weight above 0")
        wrong = [name for name in self.axes if not (name.isascii() and name.isidentifier()) or name == "reasons"]
        if wrong:
            raise ValueError(f"axis {wrong[0]!r}: a name is letters, digits and _, and not 'reasons'")
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self

    def ask(self, prompt: str, record: Mapping[str, Any] | None = None) -> str:
        """The text of the question for one prompt and its record, with what the scale wants as an answer.

        Raises:
            RewardError: the record lacks a field.
        """
        shown = {"prompt": prompt}
        for key in self.fields:
            value = (record or {}).get(key, self.defaults.get(key))
            if not isinstance(value, str) or not value.strip():
                raise RewardError(
                    f"the rubric shows {key!r} of a sample's record, and that of {prompt[:60]!r} has {value!r} there; "
                    "give every record a text under it"
                )
            shown[key] = value
        places = "|".join(map(re.escape, shown))
        text = re.sub(f"{{({places})}}", lambda found: shown[found[1]], self.question.strip())
        return f"{text}\n{self._ending()}" if self.ending else text

    def _ending(self) -> str:
        if self.scale in _ENDINGS:
            return _ENDINGS[self.scale]
        if self.scale == "written":
            axes = enumerate(self.axes.items(), 1)
            return "\n".join(
                [
                    f"Grade each of these from {self.low:g} (worst) to {self.high:g} (best), decimals allowed:",
                    *(f"{place}. {_title(name)}: {axis.about}" for place, (name, axis) in axes),
                    "For each, in this order: a line with its number and name, below it your reasons, then a line",
                    "## Score: <the grade, or N/A where it does not apply>",
                    "End with a line # Summary: and one sentence.",
                ]
            )
        lines = [f"- {name}: {axis.about}" for name, axis in self.axes.items()]
        keys = (["reasons (one or two sentences, first)"] if self.reasons else []) + list(self.axes)
        kind = "whole number" if self.whole else "number"
        return "\n".join(
            [
                f"Give each of these a {kind} from {self.low:g} (worst) to {self.high:g} (best):",
                *lines,
                f"Answer with a JSON object of exactly these keys: {', '.join(keys)}.",
            ]
        )

    def form(self) -> type[BaseModel]:
        """The JSON answer of scale `score`."""
        limits: dict[str, Any] = {"ge": self.low, "le": self.high}
        number = (int, Field(**limits)) if self.whole else (float, Field(**limits, allow_inf_nan=False))
        fields: dict[str, Any] = {"reasons": (str, ...)} if self.reasons else {}
        return strict_fields("Scores", fields | dict.fromkeys(self.axes, number))

    def read(self, answer: str) -> dict[str, float] | None:
        """Axis -> its number in an answer of scale `written`, NaN for N/A; None where it cannot be read.

        What counts is the one line `## Score:` under the heading of each axis, before the summary. A number outside
        the range counts as its end, as in the published reading; an axis without a grade, or with two, is unreadable.
        """
        names = {_title(name).lower(): name for name in self.axes}
        heading = re.compile(_HEADING.format("|".join(map(re.escape, names))), re.I)
        found: dict[str, list[str]] = {name: [] for name in self.axes}
        axis = None
        for line in _SUMMARY.split(answer, maxsplit=1)[0].splitlines():
            if at := heading.match(line):
                axis = names[(at[1] or at[2]).lower()]
            elif (score := _SCORE.match(line)) and axis is not None:
                found[axis].append(score[1].strip(" *_."))
        if any(len(grades) != 1 for grades in found.values()):
            return None
        if not all(_GRADE.fullmatch(grade) for (grade,) in found.values()):
            return None
        values = {
            name: math.nan if grade[0] in "nN" else min(max(float(grade), self.low), self.high)
            for name, (grade,) in found.items()
        }
        return None if math.isnan(self.total(values)) else values

    def total(self, answer: Mapping[str, float]) -> float:
        """Weighted mean of the axes that have a number; NaN where none with a weight has."""
        weights = {name: axis.weight for name, axis in self.axes.items() if not math.isnan(answer[name])}
        whole = sum(weights.values())
        return sum(answer[name] * weight for name, weight in weights.items()) / whole if whole else math.nan


def built_in() -> list[str]:
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load(rubric: str, reward: str) -> Rubric:
    """A built-in rubric by name, or a file by its path (.yaml, .yml).

    Raises:
        RewardError: there is none, or a key or value in it is wrong.
    """
    if not rubric.endswith((".yaml", ".yml")) and rubric not in built_in():
        raise RewardError(
            f"reward {reward!r}: rubric={rubric!r} is unknown; there are: {', '.join(built_in())}; a file of your own "
            "ends in .yaml"
        )
    path = str(FOLDER / f"{rubric}.yaml") if rubric in built_in() else rubric
    try:
        return Rubric.model_validate(yaml.safe_load(read_text(path, reward, "rubric")))
    except yaml.YAMLError as error:
        raise RewardError(f"reward {reward!r}: rubric {path!r} is not valid YAML: {error}") from None
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            place = ".".join(map(str, problem["loc"])) or "rubric"
            lines.append(f"{place}: {problem['msg'].removeprefix('Value error, ')}")
        raise RewardError(f"reward {reward!r}: rubric {path!r}: {'; '.join(lines)}") from None
