"""A part of policies that the SLA file can name, with the options that the file may give it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")

Reader = Callable[[str], Any]
"""Reads an option's value from the file's text. Raises ValueError with a sentence."""


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """A part that the file can name. `make` builds it from the given options, each read by its reader.

    A ValueError of `make` is reported as a mistake in the file. Raises ValueError here if `make` does not take one of
    the options, or requires an argument that is no option.

    `allows_shortlist`: in a large fleet it chooses nearly as well on a shortlist: the backends that hold most of the
    prompt, the ones with least to do, and some at random. A policy with a part that does not is given all backends.
    """

    make: Callable[..., T]
    options: Mapping[str, Reader] = field(default_factory=dict)
    allows_shortlist: bool = False

    def __post_init__(self) -> None:
        parameters = inspect.signature(self.make).parameters.values()
        taken = {each.name for each in parameters}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            for option in self.options.keys() - taken:
                raise ValueError(f"{self.summary} takes no argument '{option}', but this is one of its options")
        for argument in self.required - self.options.keys():
            raise ValueError(f"{self.summary} requires '{argument}', but this is none of its options")

    @property
    def required(self) -> frozenset[str]:
        """The options without a default."""
        variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        parameters = inspect.signature(self.make).parameters.values()
        return frozenset(each.name for each in parameters if each.default is each.empty and each.kind not in variadic)

    @property
    def summary(self) -> str:
        """The first line of its docstring; without a docstring the name of `make`."""
        return (inspect.getdoc(self.make) or str(getattr(self.make, "__name__", "it"))).split("\n")[0]
