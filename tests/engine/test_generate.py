"""Generation: the same words as plain llama-cpp-python, prefix reuse, stops, limits, grammar, cancelling."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Generator, Iterator

import numpy as np
import pytest

from expertd.engine.context import Cancelled
from expertd.engine.deadline import Deadline
from expertd.engine.generate import Outcome
from expertd.engine.model import LoadedModel
from expertd.engine.requests import GenerationRequest, Piece, PromptProgress, Sampling
from expertd.engine.sampler import top_logprobs
from expertd.engine.tap import RouterTap
from expertd.errors import ContextFullError, RequestError
from tests.engine.conftest import Bench, make_bench

PROMPT = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
OTHER = "<|im_start|>user\nWrite a poem about coal.<|im_end|>\n<|im_start|>assistant\n"

GREEDY = Sampling(temperature=0)


def drain(run: Generator[PromptProgress | Piece, None, Outcome]) -> tuple[list[PromptProgress | Piece], Outcome]:
    events = []
    while True:
        try:
            events.append(next(run))
        except StopIteration as end:
            return events, end.value


@pytest.fixture
def saving(loaded: LoadedModel) -> Iterator[Bench]:
    made = make_bench(loaded, saved=8 << 20)
    yield made
    made.context.close()


def test_greedy_words_are_those_of_plain_llama_cpp_python(bench: Bench) -> None:
    from llama_cpp import Llama

    plain = Llama(str(bench.model.settings.model), n_ctx=512, n_ubatch=64, verbose=False)
    expected = []
    for token in plain.generate(list(bench.ids(OTHER)), temp=0.0):
        if bench.model.is_end(token) or len(expected) == 40:
            break
        expected.append(token)
    plain.close()
    _text, tokens, _outcome = bench.run(OTHER, max_tokens=40)
    assert tokens == expected


def test_an_end_token_ends_it_and_is_not_shown(bench: Bench) -> None:
    text, _tokens, outcome = bench.run(PROMPT, max_tokens=100)
    assert text == "The capital of France is Paris."
    assert outcome.reason == "stop"
    assert outcome.stop_text == ""


def test_the_same_prompt_twice_gives_the_same_words_and_reuses_all_but_one_token(bench: Bench) -> None:
    first = bench.run(PROMPT)
    second = bench.run(PROMPT)
    assert first[:2] == second[:2]
    n_prompt = len(bench.ids(PROMPT))
    assert (first[2].timings.cache_n, second[2].timings.cache_n) == (0, n_prompt - 1)
    assert second[2].timings.prompt_n == 1


def test_without_prompt_cache_nothing_is_reused(bench: Bench) -> None:
    bench.run(PROMPT)
    assert bench.run(PROMPT, cache_prompt=False)[2].timings.cache_n == 0


def test_a_conversation_left_for_another_is_found_again(saving: Bench) -> None:
    long = PROMPT * 3
    alone = saving.run(long)
    saving.run(OTHER)
    again = saving.run(long)
    assert again[:2] == alone[:2]
    assert again[2].timings.cache_n == len(saving.ids(long)) - 1
    assert saving.conversations.counters.restored == 1


def test_saved_conversations_stay_within_their_bytes(loaded: LoadedModel) -> None:
    made = make_bench(loaded, saved=600_000)
    for i in range(6):
        made.run(f"Story number {i} of many: " + "and then " * 20, max_tokens=2)
        assert made.conversations.nbytes <= 600_000
    assert made.conversations.counters.saved > 1
    assert made.conversations.counters.dropped > 0
    made.context.close()


def test_a_stop_string_ends_it_unseen(bench: Bench) -> None:
    text, _tokens, outcome = bench.run(PROMPT, max_tokens=100, stop=("nce is", "zebra"))
    assert text == "The capital of Fra"
    assert (outcome.reason, outcome.stop_text) == ("stop", "nce is")


def test_the_token_limit_ends_it(bench: Bench) -> None:
    _text, tokens, outcome = bench.run(PROMPT, max_tokens=3)
    assert len(tokens) == 3
    assert outcome.reason == "length"
    assert outcome.timings.predicted_n == 3


def test_the_context_ends_it(loaded: LoadedModel) -> None:
    made = make_bench(loaded, n_ctx=64)
    _text, tokens, outcome = made.run(PROMPT, max_tokens=None, ignore_eos=True)
    assert outcome.reason == "length"
    assert len(made.ids(PROMPT)) + len(tokens) == made.context.n_ctx + 1
    made.context.close()


def test_the_time_limit_ends_it(bench: Bench) -> None:
    assert bench.run(PROMPT, max_tokens=None, ignore_eos=True, time_limit_seconds=1e-9)[2].reason == "time"


def test_the_time_limit_ends_a_long_prompt_inside_its_batch(loaded: LoadedModel) -> None:
    """The deadline comes while the one batch of the prompt is computed: a layer of it waits until it has come."""
    tap = RouterTap(lambda _layer, _ids, _phase: time.sleep(0.2), [64] * 8)
    made = make_bench(loaded, tap, n_ubatch=512)
    prompt = (7,) * 400
    run = made.generation.run(GenerationRequest(prompt, 4, time_limit_seconds=0.3, sampling=GREEDY))
    events, outcome = drain(run)
    assert outcome.reason == "time"
    assert outcome.timings.prompt_n == outcome.timings.predicted_n == 0
    assert not [e for e in events if isinstance(e, Piece)]
    assert made.conversations.tokens == []
    tap.routed = lambda _layer, _ids, _phase: None
    _events, outcome = drain(made.generation.run(GenerationRequest(prompt, 4, sampling=GREEDY)))
    assert outcome.timings.prompt_n == 400, "the next one is not hit by the last one's deadline"
    made.context.close()


def test_the_time_limit_ends_a_prompt_between_batches_and_keeps_what_is_done(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tuple(range(300, 500))
    looks = iter([False, True])
    monkeypatch.setattr(Deadline, "passed", property(lambda _: next(looks)))
    events, outcome = drain(bench.generation.run(GenerationRequest(prompt, 4, sampling=GREEDY)))
    assert events == [PromptProgress(0, 200, 0), PromptProgress(64, 200, 0)]
    assert (outcome.reason, outcome.timings.prompt_n, outcome.first_token_ms) == ("time", 64, 0.0)
    monkeypatch.undo()
    _events, again = drain(bench.generation.run(GenerationRequest(prompt, 1, sampling=GREEDY)))
    assert again.timings.cache_n == 64


def test_a_deadline_that_ends_with_its_request_stops_nothing_later() -> None:
    stopped: list[int] = []
    with Deadline(1.0, lambda: stopped.append(1)):
        pass
    time.sleep(1.1)
    assert stopped == []
    with Deadline(None, lambda: stopped.append(1)) as never:
        assert not never.passed


def test_a_prompt_as_long_as_the_context_is_refused_with_counts(bench: Bench) -> None:
    request = GenerationRequest((5,) * bench.context.n_ctx)
    with pytest.raises(ContextFullError, match="512 tokens, the context holds 512"):
        next(bench.generation.run(request))


def test_an_empty_prompt_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError, match="empty"):
        next(bench.generation.run(GenerationRequest(())))


def test_progress_tells_of_every_batch(bench: Bench) -> None:
    prompt = (7,) * 150
    seen = [e for e in bench.generation.run(GenerationRequest(prompt, 1)) if isinstance(e, PromptProgress)]
    assert [e.done for e in seen] == [0, 64, 128, 150]
    assert {e.total for e in seen} == {150}


def test_a_grammar_holds(bench: Bench) -> None:
    sampling = Sampling(temperature=0, grammar='root ::= "{" [0-9]+ "}"')
    text, _tokens, _outcome = bench.run(PROMPT, max_tokens=20, sampling=sampling)
    assert text[0] == "{"
    assert text[1:].rstrip("}").isdigit()


def test_a_grammar_that_does_not_parse_is_the_requests_fault(bench: Bench) -> None:
    with pytest.raises(RequestError, match="grammar"):
        bench.run(PROMPT, sampling=Sampling(grammar="root ::= ("))


def test_a_seed_repeats_and_another_differs(bench: Bench) -> None:
    hot = [bench.run(OTHER, sampling=Sampling(temperature=1.5, seed=seed))[1] for seed in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]


@pytest.mark.parametrize(
    "change",
    [
        {"mirostat": 1}, {"mirostat": 2}, {"typical_p": 0.5}, {"top_n_sigma": 1.0}, {"xtc_probability": 0.9},
        {"dynatemp_range": 0.5}, {"repeat_penalty": 1.3}, {"frequency_penalty": 0.5}, {"presence_penalty": 0.5},
        {"dry_multiplier": 0.8}, {"logit_bias": ((300, 100.0),)},
    ],
)  # fmt: skip
def test_every_sampler_runs(bench: Bench, change: dict[str, object]) -> None:
    sampling = Sampling(seed=3, **change)  # type: ignore[arg-type]
    assert len(bench.run(OTHER, max_tokens=8, ignore_eos=True, sampling=sampling)[1]) == 8


def test_a_logit_bias_decides(bench: Bench) -> None:
    sampling = Sampling(temperature=0, logit_bias=((300, 1000.0),))
    assert bench.run(OTHER, max_tokens=3, sampling=sampling)[1] == [300] * 3


def test_logprobs_are_those_of_the_whole_vocabulary(bench: Bench) -> None:
    run = bench.generation.run(GenerationRequest(bench.ids(PROMPT), 2, Sampling(temperature=0), logprobs=3))
    pieces = [e for e in run if not isinstance(e, PromptProgress) and e.tokens]
    first = pieces[0].logprobs[0]
    assert first.token == first.top[0].token
    assert first.logprob == pytest.approx(first.top[0].logprob)
    assert [t.logprob for t in first.top] == sorted((t.logprob for t in first.top), reverse=True)
    assert sum(math.exp(t.logprob) for t in first.top) <= 1.0001


def test_logprobs_sum_to_one() -> None:
    logits = np.array([1.0, 2.0, 3.0, -4.0], np.float32)
    _own, best = top_logprobs(logits, 0, 4)
    assert sum(math.exp(p) for _t, p in best) == pytest.approx(1.0)


def test_a_cancel_from_another_thread_ends_a_prompt_within_a_batch(loaded: LoadedModel) -> None:
    made = make_bench(loaded, n_ctx=1024, n_ubatch=512)
    tokens = tuple(made.ids("word " * 300))[:900]
    expected = made.run("hello", max_tokens=5)[1]
    threading.Timer(0.01, made.context.cancel).start()
    time.sleep(0.03)
    with pytest.raises(Cancelled):
        list(made.generation.run(GenerationRequest(tokens, 5)))
    made.context.clear_cancel()
    assert made.run("hello", max_tokens=5)[1] == expected
    made.context.close()


def test_a_cancel_while_tokens_come_ends_it_before_the_next(bench: Bench) -> None:
    run = bench.generation.run(GenerationRequest(bench.ids(PROMPT), None, ignore_eos=True))
    for _ in range(6):
        next(run)
    bench.context.cancel()
    with pytest.raises(Cancelled):
        next(run)
    bench.context.clear_cancel()
    assert bench.run(PROMPT)[0] == "The capital of France is Paris."


def test_every_byte_value_survives_tokenizing(loaded: LoadedModel) -> None:
    text = bytes(range(256)).decode("latin-1")
    tokens = loaded.tokenize(text, add_special=False, parse_special=False)
    assert loaded.detokenize(tokens).decode() == text
