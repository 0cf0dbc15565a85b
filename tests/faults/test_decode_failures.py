"""A decode fails, or memory runs out around it: that request ends with an error, the next one is right."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.requests import GenerationRequest, Sampling
from expertd.engine.settings import EngineSettings
from expertd.errors import EngineError
from expertd.types import Phase
from tests.daemon.conftest import daemon
from tests.engine.conftest import Bench, make_bench

PROMPT = "Once upon a time there was a miner."


@pytest.fixture(scope="module")
def weights(demo_model: Path) -> Iterator[LoadedModel]:
    start_backend()
    model = LoadedModel(EngineSettings(demo_model))
    yield model
    model.close()


@pytest.fixture
def bench(weights: LoadedModel) -> Iterator[Bench]:
    made = make_bench(weights, n_ctx=256, threads=1)
    yield made
    made.context.close()


def _fails(bench: Bench, prompt: tuple[int, ...]) -> str:
    """The error of a request that llama.cpp refuses."""
    request = GenerationRequest(prompt, 8, sampling=Sampling(temperature=0))
    with pytest.raises(EngineError) as caught:
        for _ in bench.generation.run(request):
            pass
    assert caught.value.code == "engine"
    return caught.value.line()


def test_a_batch_that_llama_cpp_refuses(bench: Bench) -> None:
    """llama_decode gives -1 for a token that the vocabulary does not have."""
    text, tokens, _ = bench.run(PROMPT)
    said = _fails(bench, (*bench.ids(PROMPT), bench.model.n_vocab + 7))
    assert "llama.cpp failed to decode (code -1)" in said
    assert bench.run(PROMPT)[:2] == (text, tokens)
    # Half way through: the first micro-batches are in the context when a later one is refused.
    long = bench.ids(PROMPT * 12)
    assert len(long) > 2 * bench.context.n_batch
    _fails(bench, (*long, bench.model.n_vocab + 7))
    assert bench.run(PROMPT)[:2] == (text, tokens)


def test_a_kv_cache_without_room(bench: Bench) -> None:
    """llama_decode gives 1 when it finds no slot."""
    text, tokens, _ = bench.run(PROMPT)
    context, n = bench.context, bench.context.n_batch
    context.keep(0)
    filler = [bench.ids(PROMPT)[1]] * n
    for position in range(0, context.n_ctx, n):
        context.decode(filler, position, Phase.PREFILL, logits=False)
    with pytest.raises(EngineError, match="no room left"):
        context.decode(filler, context.n_ctx, Phase.PREFILL, logits=False)
    bench.conversations.tokens.clear()
    bench.conversations.undo()
    assert bench.run(PROMPT)[:2] == (text, tokens)


def test_memory_that_runs_out_in_a_step_leaves_nothing_behind(bench: Bench) -> None:
    """Thrown into the generator where a decode has just run, as an allocation of the next step would be."""
    text, tokens, _ = bench.run(PROMPT)
    run = bench.generation.run(GenerationRequest(bench.ids(PROMPT * 5), 8, sampling=Sampling(temperature=0)))
    next(run)
    next(run)
    with pytest.raises(MemoryError):
        run.throw(MemoryError())
    assert bench.run(PROMPT)[:2] == (text, tokens)


_SHORT = """
import resource, sys
from pathlib import Path
from expertd.engine import openmp
openmp.load()
from expertd.engine.model import LoadedModel, start_backend
from expertd.engine.settings import EngineSettings
from tests.daemon.conftest import daemon
from tests.engine.conftest import make_bench
start_backend()
model = LoadedModel(EngineSettings(Path(sys.argv[1])))
bench = make_bench(model, saved=1 << 30, n_ctx=1024, kv_type="f32", threads=1)
first, second = "Once upon a time. " * 40, "What is the capital of France?"
alone = bench.run(second, 12)[0]
long = bench.run(first, 4)[0]
size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
state = bench.context.state_nbytes()
resource.setrlimit(resource.RLIMIT_AS, (size + state // 4, resource.RLIM_INFINITY))
assert bench.run(second, 12)[0] == alone
print("not kept", bench.conversations.counters.dropped, len(bench.conversations))
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert bench.run(first, 4)[0] == long
assert bench.run(second, 12)[0] == alone
print("kept", len(bench.conversations))
"""


def test_a_conversation_that_memory_has_no_room_for_is_not_kept(demo_model: Path) -> None:
    """A real limit on the address space: the state of a conversation cannot be copied, and the request goes on."""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-c", _SHORT, str(demo_model)],
        capture_output=True, text=True, timeout=300, check=False, env=environment, cwd=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "not kept 1 0" in done.stdout
    assert "kept 2" in done.stdout or "kept 1" in done.stdout
    assert "memory is short: a conversation of" in done.stderr


@pytest.mark.root
def test_a_daemon_that_gets_no_more_memory_serves_on(demo_model: Path, tmp_path: Path) -> None:
    """Its address space may not grow by a byte: an answer is right or an error, and all are right afterwards."""
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    with daemon(demo_model, tmp_path, "--threads", "1") as running:
        text = running.http.post("/v1/completions", json=body).json()["choices"][0]["text"]
        _, hard = resource.prlimit(running.process.pid, resource.RLIMIT_AS)
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (64 << 20, hard))
        for prompt in (PROMPT, PROMPT * 20, PROMPT):
            with contextlib.suppress(httpx.TransportError):
                answer = running.http.post("/v1/completions", json={**body, "prompt": prompt})
                if answer.status_code == 200 and prompt == PROMPT:
                    assert answer.json()["choices"][0]["text"] == text
                else:
                    assert answer.status_code in (200, 500)
        assert running.process.poll() is None, running.log
        resource.prlimit(running.process.pid, resource.RLIMIT_AS, (hard, hard))
        assert running.http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
        assert running.stop() == 0
