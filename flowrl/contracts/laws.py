"""A law of a contract: a name, what it expects, and a trial that measures it on a component."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from flowrl.core.errors import Fault, described

log = logging.getLogger("flowrl")
S = TypeVar("S")


class Broken(Exception):
    """Raised by a trial whose law does not hold; the text is what was measured. `remedy`: what mends it, in place of
    the law's expectation; None: that.
    """

    def __init__(self, measured: str, remedy: str | None = None) -> None:
        super().__init__(measured)
        self.remedy = remedy


def require(holds: bool, measured: str, remedy: str | None = None) -> str:
    """What was measured. Raises Broken unless the law holds."""
    if not holds:
        raise Broken(measured, remedy)
    return measured


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of a law's trial on a component."""

    law: str
    measured: str
    expected: str = ""
    """The law's expectation, or the remedy; empty where it holds."""

    @property
    def good(self) -> bool:
        return not self.expected

    def __str__(self) -> str:
        if self.good:
            return f"ok    {self.law}: {self.measured}"
        return f"FAIL  {self.law}: {self.measured}\n      expected: {self.expected}"


class ContractError(Fault, AssertionError):
    """A component that breaks its contract; names each broken law with what it expects and what was measured."""

    exit_code = 2

    def __init__(self, component: str, findings: Iterable[Finding]) -> None:
        self.findings = tuple(findings)
        """Outcomes of all laws that were tried."""
        self.broken = tuple(finding for finding in self.findings if not finding.good)
        count = f"{len(self.broken)} of {len(self.findings)} laws" if len(self.findings) > 1 else "a law"
        super().__init__("\n".join([f"{component} breaks {count} of its contract", *map(str, self.broken)]))


@dataclass(frozen=True, slots=True)
class Law(Generic[S]):
    """One law of a kind of component."""

    name: str
    expected: str
    trial: Callable[[S], str]
    """Gives what was measured; raises Broken where the law does not hold."""

    def find(self, subject: S) -> Finding:
        """The law tried on a component; whatever its code raises breaks the law."""
        try:
            return Finding(self.name, self.trial(subject))
        except Broken as broken:
            return Finding(self.name, str(broken), broken.remedy or self.expected)
        except (Exception, SystemExit) as error:  # somebody's code may raise anything
            log.debug("the law %r could not be tried", self.name, exc_info=error)
            return Finding(self.name, f"raised {described(error)}", self.expected)

    def hold(self, subject: S) -> None:
        """Raise ContractError unless the law holds."""
        finding = self.find(subject)
        if not finding.good:
            raise ContractError(str(subject), [finding])

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def law(name: str, expected: str) -> Callable[[Callable[[S], str]], Law[S]]:
    """Make a law of a trial."""
    return lambda trial: Law(name, expected, trial)
