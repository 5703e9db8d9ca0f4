"""What a shell would make of a script: its simple commands, with quotes, comments, continued lines and variables resolved.

Only what the start of a server needs. What cannot be known from outside stays in a word as it is written: `$NAME`, `$(command)`.
So a word with a `$` or a backquote is one whose value is not known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

Variables = Mapping[str, "str | None"]
"""Values by name; None: set, but not to be seen from here. A name that is missing may still be set by the image."""

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*]")
_PARAMETER = re.compile(r"([A-Za-z_]\w*|[0-9@*])(?:(:?[-=+])(.*))?", re.DOTALL)
_PLAIN = re.compile(r"[^\s'\"\\$`;&|()<>]+")
_PLAIN_IN_QUOTES = re.compile(r"[^\"\\$`]+")
_REDIRECTION = re.compile(r"(\d*)&?[<>]{1,3}[&|]?")
_OPENING = frozenset({"if", "while", "until", "for", "case", "select", "{"})
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_KEYWORDS = _OPENING | _CLOSING | {"then", "else", "elif", "do", "!", "time"}
_DECLARING = frozenset({"export", "readonly", "local", "declare", "typeset", "-x"})
_BOUNDARY = "\\\n"  # a continued line: the end of a name, and nothing else

# Bounds for scripts of pods that are not to be trusted: none that starts a server is near them.
_MAX_SCRIPT = 2**16  # characters
_MAX_EXPANDED = 2**17  # characters that all variables together may add


def is_unresolved(word: str) -> bool:
    """Whether the word has a part whose value cannot be told from outside."""
    return "$" in word or "`" in word


def shell_commands(
    script: str, variables: Variables, parameters: Sequence[str] = ()
) -> Iterator[tuple[tuple[str, ...], Variables]]:
    """Yield the words of each simple command in order, with the variables as they are then. Never raises.

    `parameters` are those of `sh -c script`: `$0` first. A variable that is set under a condition is not known afterwards.
    """
    return _Script(script, variables, parameters).commands()


class _Script:
    def __init__(self, text: str, variables: Variables, parameters: Sequence[str]) -> None:
        self._text = text[:_MAX_SCRIPT]
        self._budget = _MAX_EXPANDED
        self._at = 0
        self._parameters = tuple(parameters)
        self._variables = {**variables, **{str(index): "".join(self._parameters[index : index + 1]) for index in range(10)}}
        self._words: list[str] = []
        self._word: str | None = None  # None between words, "" in one that is empty so far
        self._drops_word = False  # the word is the file of a redirection
        self._only_assigns = True  # no word of the command so far is anything but NAME=value, which is not split
        self._depth = 0  # of if, for, case and functions
        self._is_alternative = False  # the command stands after ||

    def commands(self) -> Iterator[tuple[tuple[str, ...], Variables]]:
        while self._at < len(self._text):
            char = self._text[self._at]
            redirection = _REDIRECTION.match(self._text, self._at)
            if redirection and (self._word is None or not redirection[1]):  # in a word, digits are no stream as in 2>&1
                self._end_word()
                self._drops_word = True
                self._at = redirection.end()
            elif char in "\n;&|()":
                yield from self._end_command()
                self._is_alternative = self._text.startswith("||", self._at)
                self._at += 2 if self._text[self._at : self._at + 2] in ("||", "&&", ";;") else 1
            elif char in " \t\r":
                self._end_word()
                self._at += 1
            elif char == "#" and self._word is None:
                self._at = self._find("\n", self._at)
            else:
                self._take_part(char)
        yield from self._end_command()

    def _find(self, text: str, start: int) -> int:
        found = self._text.find(text, start)
        return len(self._text) if found < 0 else found

    def _take_part(self, char: str) -> None:
        """Take one part of a word: a character, an escape, a quoted text or an expansion."""
        if char == "'":
            end = self._find("'", self._at + 1)
            self._add(self._text[self._at + 1 : end])
            self._at = end + 1
        elif char == '"':
            self._take_double_quoted()
        elif char == "\\":
            escaped = self._text[self._at + 1 : self._at + 2]
            if escaped != "\n":
                self._add(escaped)
            self._at += 2
        elif char in "$`":
            self._expand(quoted=False)
        else:
            self._take_plain(_PLAIN)

    def _take_plain(self, pattern: re.Pattern[str]) -> None:
        """Take characters that mean themselves, and at least one."""
        match = pattern.match(self._text, self._at)
        end = self._at + 1 if match is None else match.end()
        self._add(self._text[self._at : end])
        self._at = end

    def _take_double_quoted(self) -> None:
        self._at += 1
        if self._text[self._at : self._at + 3] != '$@"':  # "$@" without parameters is no word at all
            self._add("")
        while self._at < len(self._text) and (char := self._text[self._at]) != '"':
            if char == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                self._add(self._text[self._at + 1].replace("\n", ""))
                self._at += 2
            elif char in "$`":
                self._expand(quoted=True)
            else:
                self._take_plain(_PLAIN_IN_QUOTES)
        self._at += 1

    def _expand(self, *, quoted: bool) -> None:
        start, self._at = self._at, self._end_of_expansion()
        raw = self._text[start : self._at]
        parameter = _PARAMETER.fullmatch(raw[2:-1] if raw.startswith("${") else raw[1:])
        name, operator, word = ("", "", "") if parameter is None else parameter.groups("")
        value = " ".join(self._parameters[1:]) if name in ("@", "*") else self._variables.get(name)
        if value is not None and operator:
            is_set = value != "" or not operator.startswith(":")
            if is_set == operator.endswith("+"):  # the word takes its place, and is read in turn
                self._text = self._text[:start] + word + _BOUNDARY + self._text[self._at :]
                self._at = start
                return
            value = "" if operator.endswith("+") else value
        self._budget -= len(value or "")
        if value is None or self._budget < 0:
            self._add(raw)
        elif name == "@" and quoted:
            self._add_separated(self._parameters[1:])
        elif quoted or (self._only_assigns and _ASSIGNMENT.match(self._word or "")):
            self._add(value)
        else:
            if value[:1].isspace():
                self._end_word()
            self._add_separated(value.split())
            if value[-1:].isspace():
                self._end_word()

    def _add_separated(self, parts: Sequence[str]) -> None:
        """Add parts of which all but the last end a word."""
        for index, part in enumerate(parts):
            if index:
                self._end_word()
            self._add(part)

    def _end_of_expansion(self) -> int:
        opening = self._text[self._at : self._at + 2]
        if opening[0] == "`":
            return self._find("`", self._at + 1) + 1
        if opening not in ("$(", "${"):
            name = _NAME.match(self._text, self._at + 1)
            return self._at + 1 if name is None else name.end()
        closing = ")" if opening == "$(" else "}"
        depth = 0
        for index in range(self._at + 1, len(self._text)):
            depth += {opening[1]: 1, closing: -1}.get(self._text[index], 0)
            if not depth:
                return index + 1
        return len(self._text)

    def _add(self, text: str) -> None:
        self._word = (self._word or "") + text

    def _end_word(self) -> None:
        if self._word is not None:
            if not self._drops_word:
                self._words.append(self._word)
                self._only_assigns &= self._word in _KEYWORDS | _DECLARING or _ASSIGNMENT.match(self._word) is not None
            self._drops_word = False
        self._word = None

    def _end_command(self) -> Iterator[tuple[tuple[str, ...], Variables]]:
        self._end_word()
        self._drops_word = False
        words, self._words, self._only_assigns = self._words, [], True
        while words and words[0] in _KEYWORDS:
            word = words.pop(0)
            self._depth += (word in _OPENING) - (word in _CLOSING)
            if word in ("for", "select") and words:
                self._variables[words[0]] = None
        if not words:
            return
        names = [word for word in words if word not in _DECLARING]
        assignments = [_ASSIGNMENT.fullmatch(word) for word in names]
        if all(assignments):
            for match in assignments:
                if match is not None:
                    is_known = not (self._depth or self._is_alternative or is_unresolved(match[2]))
                    self._variables[match[1]] = match[2] if is_known else None
            return
        yield tuple(words), self._variables
