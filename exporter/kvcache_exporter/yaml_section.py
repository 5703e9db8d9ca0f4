"""A YAML file while it is being read: known keys are taken, others refused, and every problem is kept with its line."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import yaml

from kvcache_exporter.errors import ConfigError

_T = TypeVar("_T")
_NULL = "tag:yaml.org,2002:null"


def compose(text: str, path: Path) -> yaml.Node | None:
    """Parse the text of the file `path` into nodes, which know their lines; None for an empty file. Raises ConfigError."""
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f"{mark.line + 1}:"
        problem = getattr(error, "problem", None) or error
        raise ConfigError([f"{path}:{line} is not YAML: {problem}"]) from error
    return node


class Section:
    """One mapping of the file while it is being read: takes known keys, remembers the rest, collects problems with their line."""

    def __init__(self, node: yaml.MappingNode, where: str, path: Path, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._where = where
        self._line = node.start_mark.line + 1
        self._nodes: dict[str, yaml.Node] = {}
        self._known: set[str] = set()
        self._lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            self._lines[name] = key.start_mark.line + 1
            if name in self._nodes:
                self.problem(name, "is given twice; keep one")
            self._nodes[name] = value

    def problem(self, key: str, sentence: str) -> None:
        """Report what is wrong with `key`; the line is that of the section where the key is missing."""
        line = self._lines.get(key, self._line)
        self.problems.append(f"{self.path}:{line}: {self._where}{key}: {sentence}")

    def take(self, key: str, convert: Callable[[object], _T], default: _T) -> _T:
        """Convert the value of `key`; missing or null gives the default, and a ValueError of `convert` becomes a problem."""
        self._known.add(key)
        try:
            value = self._construct(key)
            return default if value is None else convert(value)
        except yaml.YAMLError as error:
            self.problem(key, f"cannot be read: {getattr(error, 'problem', None) or error}")
        except ValueError as error:
            self.problem(key, str(error))
        return default

    def gives(self, key: str) -> bool:
        """Whether the file has a value for `key`, good or not."""
        node = self._nodes.get(key)
        return node is not None and node.tag != _NULL

    def names(self) -> list[str]:
        """Every key of the section, known or not, in the order of the file."""
        return list(self._nodes)

    def section(self, key: str) -> Section | None:
        """Section of the mapping under `key`; None, with a problem unless the value is null, where there is no mapping."""
        self._known.add(key)
        node = self._nodes.get(key)
        if isinstance(node, yaml.MappingNode):
            return Section(node, f"{self._where}{key}.", self.path, self.problems)
        if self.gives(key):
            self.problem(key, "is not a mapping; write its settings below it, each indented")
        return None

    def items(self, key: str) -> list[yaml.Node]:
        """Nodes of the list under `key`."""
        self._known.add(key)
        node = self._nodes.get(key)
        if isinstance(node, yaml.SequenceNode) and node.value:
            return list(node.value)
        self.problem(key, "needs a list with at least one entry, such as `- url: http://127.0.0.1:8000`")
        return []

    def refuse_unknown_keys(self) -> None:
        """Report every key that nothing took, with the nearest known one."""
        for key in self._nodes.keys() - self._known:
            near = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(sorted(self._known))}"
            self.problem(key, f"is not a setting; {hint}")
        self.problems.sort(key=lambda problem: int(problem.removeprefix(f"{self.path}:").partition(":")[0]))

    def _construct(self, key: str) -> object:
        node = self._nodes.get(key)
        if node is None:
            return None
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node, deep=True)
        finally:
            loader.dispose()
