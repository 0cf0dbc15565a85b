"""What the router tap costs a decoded token: `python -m expertd.bench.tap_cost [MODEL]` prints JSON.

Four contexts of one model take turns: without a tap; with one that wants no layer, once behind the filter in machine
code (`engine.ask`) and once without; and with one that looks at every layer, its receiver doing nothing. Milliseconds a
token, and the lowest and highest turn.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import click

from expertd.bench.inflate import built_in
from expertd.engine import openmp
from expertd.types import Phase

_PROMPT = range(5, 25)
_TOKENS = 15


def measure(model: Path, rounds: int) -> dict[str, dict[str, float]]:
    """By arm: median, low and high in milliseconds a token."""
    # These import llama_cpp, which must come after its threads were settled.
    from expertd.engine.context import Context
    from expertd.engine.model import LoadedModel, start_backend
    from expertd.engine.settings import EngineSettings
    from expertd.engine.tap import RouterTap

    settings = EngineSettings(model, n_ctx=len(_PROMPT) + rounds * _TOKENS, lazy_load=False)
    start_backend()
    loaded = LoadedModel(settings)

    def tap(*, native: bool, looks: bool) -> RouterTap:
        return RouterTap(lambda *_: None, [1 << 15] * 512, want=None if looks else lambda _: False, native=native)

    taps = {
        "no tap": None,
        "wants nothing": tap(native=True, looks=False),
        "wants nothing, without filter": tap(native=False, looks=False),
        "looks at all": tap(native=True, looks=True),
    }
    contexts = {name: Context(loaded, settings, each) for name, each in taps.items()}
    turns: dict[str, list[float]] = {name: [] for name in taps}
    for context in contexts.values():
        context.decode(list(_PROMPT), 0, Phase.PREFILL, logits=True)
    for at in range(len(_PROMPT), len(_PROMPT) + rounds * _TOKENS, _TOKENS):
        for name, context in contexts.items():
            began = time.perf_counter()
            for position in range(at, at + _TOKENS):
                context.decode([7], position, Phase.DECODE, logits=True)
            turns[name].append((time.perf_counter() - began) / _TOKENS * 1e3)
    for context in contexts.values():
        context.close()
    loaded.close()
    return {
        name: {"median": round(statistics.median(t), 4), "low": round(min(t), 4), "high": round(max(t), 4)}
        for name, t in turns.items()
    }


@click.command()
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="Turns of 15 tokens each.")
def main(model: Path | None, rounds: int) -> None:
    """What the router tap costs a decoded token, as JSON."""
    openmp.load()
    click.echo(json.dumps(measure(model or built_in(), rounds), indent=2))


if __name__ == "__main__":
    main()
