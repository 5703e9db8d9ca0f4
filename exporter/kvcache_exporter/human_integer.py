"""Whole numbers as vLLM's command line takes them: `8192`, `8k` (thousands), `8K` (1024)."""

from __future__ import annotations

import re

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

# 18 digits are more than any setting has, and stay finite as a float.
_NUMBER = re.compile(r"(\d{1,18}(?:\.\d{1,18})?)([kmgtKMGT]?)")


def parse_human_integer(text: str) -> int:
    """Read a positive whole number, as `human_readable_int` of vLLM's argument parser does. Raises ValueError.

    Fractions of the units of 1024 (`0.5M`), which vLLM refuses, are read too.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        number = 0
    elif "." in match[1]:
        number = int(float(match[1]) * _UNITS[match[2]])
    else:
        number = int(match[1]) * _UNITS[match[2]]
    if number <= 0:
        raise ValueError(f"{text!r} is not a positive whole number, such as 8192 or 8K")
    return number
