"""Requests to an engine, of exact lengths in tokens."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests
from engine import SERVED_MODEL_NAME
from tiny_model import FIRST_WORD, VOCAB_SIZE

_TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Request:
    """One request: its tokens, and when it is sent (seconds after the load began)."""

    prompt_tokens: int
    output_tokens: int
    after_seconds: float = 0.0


class Load:
    """Sends each request at its time, whatever became of the others (an open loop). Starts at once.

    `token_by_token` lets `kept_tokens` follow what the engine makes, at a price: its API server sends each token by itself.
    """

    def __init__(self, engine_url: str, plan: Sequence[Request], *, seed: int, token_by_token: bool = False) -> None:
        self._url = f"{engine_url}/v1/completions"
        self._plan = plan
        self._token_by_token = token_by_token
        self._made = [0] * len(plan)
        self.failures: list[str] = []
        # Prompts of their own, so that no request finds another's blocks in the prefix cache.
        draw = random.Random(seed)
        prompts = [draw.choices(range(FIRST_WORD, VOCAB_SIZE), k=request.prompt_tokens) for request in plan]
        self._threads = [
            threading.Thread(target=self._send, args=(index, prompt), daemon=True) for index, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_done(self) -> bool:
        """Whether every request has been answered."""
        return not any(thread.is_alive() for thread in self._threads)

    def join(self) -> None:
        """Wait for every answer. Raises RuntimeError when a request failed or came back with another number of tokens."""
        for thread in self._threads:
            thread.join()
        if self.failures:
            raise RuntimeError(f"{len(self.failures)} of {len(self._threads)} requests failed; the first: {self.failures[0]}")

    def kept_tokens(self) -> list[int]:
        """Tokens in the cache of each request that has made some of its tokens and not all; the newest is not in it yet."""
        return [
            request.prompt_tokens + made - 1
            for request, made in zip(self._plan, self._made, strict=True)
            if 0 < made < request.output_tokens
        ]

    def _send(self, index: int, prompt: list[int]) -> None:
        request = self._plan[index]
        time.sleep(request.after_seconds)
        body: dict[str, Any] = {
            "model": SERVED_MODEL_NAME,
            "prompt": prompt,
            "max_tokens": request.output_tokens,
            "ignore_eos": True,
            # No `seed` beside it: with one in a request, vLLM's sampler on CPU ends the engine.
            "temperature": 1.0,
        }
        if self._token_by_token:
            # The number of tokens made so far comes with each one.
            body |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        try:
            with requests.post(self._url, json=body, timeout=_TIMEOUT_SECONDS, stream=True) as response:
                response.raise_for_status()
                for line in response.iter_lines():
                    if (answer := line.removeprefix(b"data: ")).startswith(b"{"):
                        self._made[index] = json.loads(answer)["usage"]["completion_tokens"]
        except (requests.RequestException, ValueError, KeyError) as error:
            self.failures.append(repr(error))
            return
        if self._made[index] != request.output_tokens:
            self.failures.append(f"{self._made[index]} tokens came instead of {request.output_tokens}")


def rising_load(number: int, *, seconds: float, seed: int) -> list[Request]:
    """`number` requests of 400 to 1800 tokens; they come the denser the later, the last after `seconds`."""
    draw = random.Random(seed)
    return [
        Request(draw.randint(100, 600), draw.randint(300, 1200), after_seconds=seconds * (index / number) ** 0.5)
        for index in range(number)
    ]


def even_load(number: int, *, seconds: float, seed: int) -> list[Request]:
    """`number` requests of 400 to 600 tokens, evenly over `seconds`."""
    draw = random.Random(seed)
    return [
        Request(draw.randint(340, 460), draw.randint(60, 140), after_seconds=seconds * index / number) for index in range(number)
    ]
