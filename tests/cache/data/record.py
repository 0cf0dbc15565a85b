"""Records the traces beside it: `python tests/cache/data/record.py`. The prompts below were written for this; the
replies are the built-in model's, sampled with fixed seeds, so that a rerun on the same llama.cpp gives the same files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from expertd.engine.requests import GenerationRequest, Sampling
from expertd.engine.settings import EngineSettings
from expertd.runtime.service import Service
from expertd.runtime.settings import RuntimeSettings
from expertd.runtime.trace_file import TraceWriter, pack
from expertd.types import Phase

CHAT = (
    "<|im_start|>user\nWhat is a mixture of experts, in plain words?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhich city is the capital of Norway, and what is it known for?<|im_end|>\n"
    "<|im_start|>assistant\n",
    "<|im_start|>user\nGive me three reasons to keep a diary.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHow do bees find their way home in the evening?<|im_end|>\n<|im_start|>assistant\n",
)
CODE = (
    'def merge_intervals(intervals):\n    """Join intervals that touch."""\n    intervals = sorted(intervals)\n',
    "class Ledger:\n    def __init__(self, path):\n        self.path = path\n        self.rows = []\n\n"
    "    def add(self, row):\n",
    "#include <stdio.h>\n#include <stdlib.h>\n\nstatic int compare(const void *a, const void *b)\n{\n",
    "import json\nimport sys\n\ndef main(argv):\n    with open(argv[1]) as file:\n        data = json.load(file)\n",
)
MIXED = (
    "The old lighthouse keeper climbed the stairs each evening, counting them as his father had done, and at the top",
    "2024-03-11 06:25:01 host7 cron[811]: (root) CMD (run-parts /etc/cron.hourly)\n"
    "2024-03-11 06:25:02 host7 sshd[902]: ",
    CODE[0],
    "<html>\n<head>\n  <title>Timetable</title>\n  <style>\n    td { padding: 4px; }\n  </style>\n</head>\n"
    "<body>\n<table>\n",
    "La casa estaba al final de un camino de piedra, y desde la ventana se veía el mar cuando no había niebla. ",
    CHAT[2],
)
TRACES = {"chat": CHAT, "code": CODE, "mixed": MIXED}
TOKENS = {"chat": 100, "code": 100, "mixed": 66}


async def record(service: Service, name: str, prompts: Sequence[str]) -> None:
    steering = service.steering
    assert steering is not None
    layout = steering.layout
    path = Path(__file__).with_name(f"{name}.trace")
    header = {
        "model": "tiny-moe-q4_0.gguf", "layers": layout.n_layers, "experts": layout.n_experts,
        "experts_used": layout.n_experts_used, "started": 0.0,
        "expert_bytes": {str(m.layer): m.expert_nbytes for m in layout.layers},
    }  # fmt: skip
    records: list[bytes] = []
    step, width, last = -1, 1, layout.n_layers

    def observe(layer: int, ids: Sequence[int], phase: Phase) -> None:
        nonlocal step, width, last
        if layer <= last:
            step += width
            width = len(ids) // layout.n_experts_used
        last = layer
        records.append(pack(step, layer, phase, ids))

    steering.look_at_all = True
    steering.observers.append(observe)
    for seed, prompt in enumerate(prompts):
        tokens = tuple(service.tokenize(prompt, add_special=True, parse_special=True))
        sampling = Sampling(temperature=0.8, seed=seed)
        request = GenerationRequest(tokens, TOKENS[name], sampling, ignore_eos=True, cache_prompt=False)
        async for _ in service.generate(request):
            pass
    steering.observers.remove(observe)
    writer = TraceWriter(path, header)
    writer.block(b"".join(records))
    writer.close()


async def main() -> None:
    model = Path(str(resources.files("expertd") / "data" / "tiny-moe-q4_0.gguf"))
    service = Service(RuntimeSettings(EngineSettings(model, n_ctx=512), steering="on"))
    service.start()
    while service.state in ("loading", "warming"):
        await service.wait_changed()
    for name, prompts in TRACES.items():
        await record(service, name, prompts)
    await service.stop()


if __name__ == "__main__":
    asyncio.run(main())
