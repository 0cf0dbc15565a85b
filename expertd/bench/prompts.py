"""What the arms are asked: a file of prompts, a few of our own, or token ids where there are no words."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from expertd.bench.spec import Prompt
from expertd.errors import BenchError, UsageError

BUILT_IN = (
    Prompt("prose", "The old road to the harbour ran between two stone walls, and in the evening the fishermen came up "
           "it with their baskets, talking of the weather and of the boats that had not yet come in."),
    Prompt("python", 'def read_lines(path):\n    """Return the lines of a file without their ends."""\n    lines = []\n'
           "    with open(path) as file:\n        for line in file:\n"),
    Prompt("chat", "<|im_start|>user\nWhat is a mixture of experts?<|im_end|>\n<|im_start|>assistant\n"),
    Prompt("logs", "2024-05-03T10:14:22Z INFO worker-3 request id=8812 path=/api/items status=200 ms=41\n"
           "2024-05-03T10:14:23Z WARN worker-1 request id=8813 path=/api/items status=503 ms=1002\n"),
)  # fmt: skip
"""One prompt for each of four kinds of text, written for this project."""


def from_file(path: Path, topics: Sequence[str] = (), per_topic: int = 1) -> tuple[Prompt, ...]:
    """Prompts of a JSON-lines file with `text` and perhaps `topic`, the first `per_topic` of each wanted topic (all
    topics where none is named), in the file's order. Raises BenchError when it cannot be read, UsageError when it is
    none or has no such topic."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as e:
        raise BenchError(f"cannot read the prompts {path}: {e}") from e
    taken: dict[str, list[Prompt]] = {}
    order = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = _prompt(line, f"{path}, line {number}")
        seen = taken.setdefault(prompt.topic, [])
        if (not topics or prompt.topic in topics) and len(seen) < per_topic:
            seen.append(prompt)
            order.append(prompt)
    missing = [t for t in topics if not taken.get(t)]
    if missing or not order:
        known = ", ".join(sorted(t for t in taken if t)) or "none"
        raise UsageError(f"{path} has no prompt of {', '.join(missing) or 'any kind'}", hint=f"its topics: {known}")
    return tuple(order)


def _prompt(line: str, where: str) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as e:
        raise UsageError(f"{where} is not JSON", hint='give lines such as {"topic": "code", "text": "..."}') from e
    text = record.get("text") if isinstance(record, dict) else None
    if not isinstance(text, str) or not text:
        raise UsageError(f"{where} has no text", hint='give lines such as {"topic": "code", "text": "..."}')
    return Prompt(str(record.get("topic", "")), text)


def random_tokens(n: int, vocab: int, seed: int) -> Prompt:
    """`n` token ids for a model whose words mean nothing."""
    draw = random.Random(seed)
    return Prompt("random", tokens=tuple(draw.randrange(256, vocab - 3) for _ in range(n)))
