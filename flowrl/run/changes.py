"""What may differ when a run is resumed: by itself, or because `--accept-changes` names it.

A resumed run is bitwise the undisturbed one, so its configuration is the old one. Some options take no part in that; of
the others those may be changed on purpose that no state of a checkpoint contradicts, and the run folder records it.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flowrl.core import registry
from flowrl.core.assets import table
from flowrl.core.errors import ConfigError, Remedy
from flowrl.core.files import is_mapping
from flowrl.core.strict import Options
from flowrl.data.contents import ACCEPT

_TABLES = table(Path(__file__).with_suffix(".yaml"))
BATCHES: tuple[str, ...] = tuple(_TABLES["batches"])
MAY_CHANGE: tuple[str, ...] = (*_TABLES["may_change"], *BATCHES)
ACCEPTABLE: tuple[str, ...] = tuple(_TABLES["acceptable"])
"""Options that a resumed run may have another value of on purpose, from its next update or evaluation on."""
FILES = "files"
"""The word among the accepted that means other contents of the user's files."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """What `--accept-changes` accepts."""

    files: bool = False
    """Other contents of the user's files than the run was started with."""
    keys: tuple[str, ...] = ()
    """Dotted options that may have another value."""

    @classmethod
    def of(cls, words: bool | Sequence[str]) -> "Accepted":
        """From the words after `--accept-changes`; without any (True) it means the files."""
        if isinstance(words, bool):
            return cls(words)
        return cls(FILES in words, tuple(word for word in words if word != FILES))

    def require_acceptable(self, tree: Options) -> None:
        """Refuse keys that a resumed run cannot have another value of; `tree` is the whole configuration.

        Raises ConfigError: with the key and the reason.
        """
        for key in self.keys:
            if key in ACCEPTABLE or key in MAY_CHANGE:
                continue
            known = leaves(tree)
            if key not in known and not any(name.startswith(f"{key}.") for name in known):
                raise ConfigError(
                    f"{ACCEPT} {key}: there is no such option; {registry.suggest(key, list(known))}it takes "
                    f"{FILES} and {', '.join(ACCEPTABLE)}"
                )
            reason = _TABLES["reasons"].get(key.partition(".")[0], "it makes another run")
            if any(name.startswith(f"{key}.") for name in ACCEPTABLE):
                reason = "it holds several options; name one of them"
            raise ConfigError(f"{ACCEPT} {key}: {reason}. It takes {FILES} and {', '.join(ACCEPTABLE)}")

    def agreed(self, changed: Mapping[str, str]) -> list[str]:
        """Sentences about the changes that are accepted."""
        return [text for key, text in changed.items() if key in self.keys]

    def require(self, run: Path, changed: Mapping[str, str], now: Options) -> None:
        """Refuse changes (key -> sentence) that are not accepted; `now` is the configuration.

        Raises ConfigError: with the sentences, and the command that accepts them if it can.
        """
        rest = [key for key in changed if key not in self.keys]
        if not rest:
            return
        remedies = [Remedy(command=f"flowrl train {shlex.quote(str(run))} --resume")]
        if all(key in ACCEPTABLE for key in rest):
            remedies.append(Remedy(command=accepting(remedies[0].command, {key: leaves(now)[key] for key in rest})))
        raise ConfigError(
            f"the run folder {run} holds a run with another configuration: {'; '.join(changed.values())}. Choose "
            "another name, go on with the old values, or accept the change where that is possible",
            remedies=remedies,
        )


def accepting(command: str, values: Mapping[str, object]) -> str:
    """A command that resumes a run, with other values of options that it accepts."""
    words = [word for word in shlex.split(command) if word.partition("=")[0] not in values]
    words += [] if ACCEPT in words else [ACCEPT]
    for key, value in values.items():
        words += [key, f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    return shlex.join(words)


def leaves(tree: Options, prefix: str = "") -> dict[str, object]:
    """Dotted key -> value of all options; a list is one value."""
    result: dict[str, object] = {}
    for key, value in tree.items():
        result |= leaves(value, f"{prefix}{key}.") if is_mapping(value) else {f"{prefix}{key}": value}
    return result


def differences(old: Options, new: Options, may_change: Sequence[str] = MAY_CHANGE, prefix: str = "") -> dict[str, str]:
    """Values that differ in two trees: key -> "key was 1, now 2"; those in `may_change` are left out."""
    result: dict[str, str] = {}
    for key in sorted(set(old) | set(new)):
        place = f"{prefix}{key}"
        a, b = old.get(key), new.get(key)
        if a == b or place in may_change:
            continue
        if is_mapping(a) and is_mapping(b):
            result |= differences(a, b, may_change, f"{place}.")
        else:
            result[place] = f"{place} was {a!r}, now {b!r}"
    return result
