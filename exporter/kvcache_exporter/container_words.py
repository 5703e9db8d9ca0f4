"""The words of the process that a Kubernetes container runs, or that a text of arguments means."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvcache_exporter.shell_words import Variables, shell_commands
from kvcache_exporter.vllm_command_line import server_arguments

_REFERENCE = re.compile(r"\$\$|\$\(([^()]*)\)")
_SHELLS = frozenset({"sh", "bash", "dash", "ash", "zsh"})
_SHELL = ("sh", "-c")
_MAX_NESTED = 5  # of shells in shells
_MAX_WORDS = 2**17  # characters; Linux starts no process with a longer word
_FLAG_AND_VALUE = re.compile(r"\s*(--?[^\s=]+)\s+(['\"]?)(.*)\2\s*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SERVER_IN_LINE = re.compile(r"(^|\s|/)vllm\s+serve(\s|$)|\s-m\s+vllm\.entrypoints\.openai\.api_server(\s|$)")


def container_words(command: Sequence[str], args: Sequence[str], env: Variables) -> tuple[str, ...]:
    """The words of vLLM's server if a shell starts it in this container, or all words of the container.

    `env` is the container's, None for a value that comes from elsewhere (`valueFrom`). What is not known stays as it is written:
    `$(NAME)` of Kubernetes, `$NAME` or `$(command)` of a shell. Never raises.
    """
    return _server_words(tuple(_with_references(word, env) for word in (*command, *args)), env)


def words_of_text(text: str) -> tuple[str, ...]:
    """The words of a text: one argument a line if it has several lines, else shell syntax. Never raises.

    A line may also be a flag with its value. Lines with a script that starts vLLM's server give the words of that server.
    """
    lines = [line.rstrip("\r") for line in text.strip().split("\n") if line.strip()]
    script = _script_of(lines)
    if script is not None:
        # An argument of several lines is not told from several arguments: what follows is taken for the rest of the script.
        return _server_words((*_SHELL, "\n".join((script.text, *script.parameters))), script.variables)
    if len(lines) == 1 or any(line.endswith("\\") or _SERVER_IN_LINE.search(line) for line in lines):
        words = _server_words((*_SHELL, "\n".join(lines)), {})
        return words if words[:2] != _SHELL else tuple(word for each, _ in shell_commands(words[2], {}) for word in each)
    return tuple(word for line in lines for word in _flag_and_value(line))


def _flag_and_value(line: str) -> tuple[str, ...]:
    match = _FLAG_AND_VALUE.fullmatch(line)
    return (line,) if match is None else (match[1], match[3])


def _with_references(word: str, env: Variables) -> str:
    """Expand `$(NAME)`, and `$$` to `$`, as Kubernetes does in command and args."""
    names = [name for name in _REFERENCE.findall(word) if name]
    if sum(len(env.get(name) or "") for name in names) > _MAX_WORDS:
        return word

    def value(match: re.Match[str]) -> str:
        known = env.get(match[1]) if match[1] is not None else "$"
        return match[0] if known is None else known

    return _REFERENCE.sub(value, word)


def _server_words(words: tuple[str, ...], env: Variables, nested: int = 0) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(_servers(words, env, nested)))
    if len(found) > 1:
        return "vllm", "serve", f"$(arguments of one of {len(found)} commands)"
    return found[0] if found else words


def _servers(words: Sequence[str], env: Variables, nested: int) -> Iterator[tuple[str, ...]]:
    """The commands among the words, and in their scripts, that start vLLM's server."""
    script = _script_of(words)
    if script is None:
        if server_arguments(words) is not None and words[0] not in ("echo", "printf"):
            yield tuple(words)
    elif nested < _MAX_NESTED:
        for command, variables in shell_commands(script.text, {**env, **script.variables}, script.parameters):
            yield from _servers(command, variables, nested + 1)


@dataclass(frozen=True)
class _Script:
    """A script with what stands after it, `$0` first, and the variables that are set for it alone."""

    text: str
    parameters: Sequence[str] = ()
    variables: Variables = field(default_factory=dict)


def _script_of(words: Sequence[str]) -> _Script | None:
    """The script of `sh -c script`, with anything before it, or of `eval`."""
    if list(words[:1]) == ["eval"]:
        return _Script(" ".join(words[1:]))
    for index, word in enumerate(words):
        if word.rpartition("/")[2] not in _SHELLS:
            continue
        at, has_script = index + 1, False
        while at < len(words) and words[at][:1] in ("-", "+"):
            is_short = not words[at].startswith("--")
            has_script |= is_short and "c" in words[at]
            at += 2 if is_short and words[at].endswith("o") else 1  # -o and -euo have an operand
        if has_script and at < len(words):
            assignments = filter(None, map(_ASSIGNMENT.fullmatch, words[:index]))
            return _Script(words[at], words[at + 1 :], {match[1]: match[2] for match in assignments})
    return None
