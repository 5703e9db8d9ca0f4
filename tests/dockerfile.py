"""The Dockerfile as a list of its instructions by stage, what reaches its builder, and the locks that it installs from."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from docker.utils.build import exclude_paths
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parent.parent
DOCKERFILE = REPOSITORY / "Dockerfile"
BUILD_LOCK, RUNTIME_LOCK = (REPOSITORY / "requirements" / f"{name}.lock" for name in ("build", "runtime"))


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name` in capitals, and what follows it with its lines joined."""

    name: str
    value: str

    @property
    def words(self) -> list[str]:
        """Its words: of a JSON array the elements, else as a shell splits them."""
        words: list[str] = json.loads(self.value) if self.value.startswith("[") else shlex.split(self.value)
        return words

    @property
    def pairs(self) -> dict[str, str]:
        """The values of ENV or LABEL by name."""
        return dict(word.split("=", 1) for word in self.words)


def stages() -> list[list[Instruction]]:
    """Give the instructions from each FROM to the next; first those before any FROM."""
    found: list[list[Instruction]] = [[]]
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.startswith("#")]
    for logical in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        name, value = logical.split(maxsplit=1)
        if name == "FROM":
            found.append([])
        found[-1].append(Instruction(name, value))
    return found


def build_context() -> set[str]:
    """Every path that Docker would send to the builder, relative to the repository, by the rules of .dockerignore."""
    patterns = [line for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    return set(exclude_paths(str(REPOSITORY), patterns))


def pins(lock: Path) -> list[Requirement]:
    """Give every pin of a lock, without its hashes."""
    return [Requirement(line.removesuffix("\\")) for line in lock.read_text().splitlines() if line[:1].isalnum()]
