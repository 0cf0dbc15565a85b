"""The official openai and anthropic clients against the real model."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import LiveServer

ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "The capital of France is Paris."
GREEDY = {"temperature": 0}
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}


@pytest.fixture(scope="module")
def client(live: LiveServer) -> Any:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(live: LiveServer) -> Any:
    with anthropic.Anthropic(base_url=live.url, api_key="none", max_retries=0) as made:
        yield made


class Town(BaseModel):
    city: Literal["Paris", "Rome"]
    big: bool


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=ASK, temperature=0, max_completion_tokens=20)
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["predicted_n"] == answer.usage.completion_tokens
    assert answer.model_extra["expertd"]["expert_requests"] > 0


def test_chat_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="any", messages=ASK, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == TEXT
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(model="any", messages=ASK, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert final.choices[0].message.content == TEXT
    assert {"chunk", "content.delta", "content.done"} <= kinds


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any", messages=ASK, temperature=0, logprobs=True, top_logprobs=2, max_tokens=5
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert len(tokens) == 5
    assert [len(t.top_logprobs) for t in tokens] == [2] * 5


def test_tools(client: openai.OpenAI) -> None:
    fields: Any = {"model": "any", "messages": ASK, "tools": [TOOL], "tool_choice": "required", "temperature": 0}
    answer = client.chat.completions.create(**fields, parallel_tool_calls=False)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
    with client.chat.completions.stream(**fields, parallel_tool_calls=False) as stream:
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or []
    assert streamed.function.arguments == call.function.arguments
    history = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    again = client.chat.completions.create(model="any", messages=history, tools=[TOOL], max_tokens=5)
    assert again.usage is not None


def test_structured_output(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="any", messages=ASK, response_format=Town, temperature=0, max_tokens=300
    )
    assert isinstance(answer.choices[0].message.parsed, Town)


def test_completions(client: openai.OpenAI) -> None:
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    answer = client.completions.create(model="any", prompt=prompt, temperature=0, max_tokens=20, logprobs=1)
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].logprobs is not None
    assert "".join(answer.choices[0].logprobs.tokens or []) == TEXT
    stream = client.completions.create(model="any", prompt=prompt, temperature=0, max_tokens=20, stream=True)
    assert "".join(c.choices[0].text for c in stream) == TEXT


def test_models_and_errors(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert client.models.retrieve(model.id).id == model.id
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nothing")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 2000}])
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.InternalServerError) as missing:
        client.embeddings.create(model="any", input="text")
    assert missing.value.status_code == 501


def test_responses(client: openai.OpenAI) -> None:
    answer = client.responses.create(model="any", input=ASK, temperature=0, instructions=None)
    assert answer.output_text == TEXT
    assert answer.status == "completed"
    assert answer.usage is not None
    assert answer.usage.total_tokens > 0
    cut = client.responses.create(model="any", input=ASK, temperature=0, max_output_tokens=2)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_responses_stream(client: openai.OpenAI) -> None:
    events = list(client.responses.create(model="any", input=ASK, temperature=0, stream=True))
    assert [e.sequence_number for e in events] == list(range(len(events)))
    kinds = [e.type for e in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == TEXT
    with client.responses.stream(model="any", input=ASK, temperature=0) as stream:
        assert stream.get_final_response().output_text == TEXT


def test_responses_tools_and_schema(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}
    fields: Any = {"model": "any", "input": ASK, "tools": [tool, {"type": "web_search"}], "temperature": 0}
    answer = client.responses.create(**fields, tool_choice="required", parallel_tool_calls=False)
    call = answer.output[-1]
    assert call.type == "function_call"
    assert call.name == "weather"
    with client.responses.stream(**fields, tool_choice="required", parallel_tool_calls=False) as stream:
        streamed = stream.get_final_response().output[-1]
    assert streamed.arguments == call.arguments
    again: Any = [*ASK, call, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    client.responses.create(model="any", input=again, tools=[tool], max_output_tokens=5)
    parsed = client.responses.parse(model="any", input=ASK, text_format=Town, temperature=0, max_output_tokens=300)
    assert isinstance(parsed.output_parsed, Town)


def test_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="any", messages=ASK, max_tokens=20, extra_body=GREEDY, system="Be brief.")
    assert answer.content[0].type == "text"
    assert answer.stop_reason in ("end_turn", "max_tokens")
    plain = claude.messages.create(
        model="any", messages=ASK, max_tokens=20, extra_body=GREEDY, stop_sequences=["Paris"]
    )
    assert plain.content[0].text == "The capital of France is "
    assert plain.stop_reason == "stop_sequence"
    assert plain.stop_sequence == "Paris"
    count = claude.messages.count_tokens(model="any", messages=ASK)
    assert count.input_tokens == plain.usage.input_tokens + (plain.usage.cache_read_input_tokens or 0)


def test_messages_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model="any", messages=ASK, max_tokens=20, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == TEXT
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens > 0
    kinds = [e.type for e in claude.messages.create(model="any", messages=ASK, max_tokens=2, stream=True)]
    assert kinds[0] == "message_start"
    assert kinds[1] == "content_block_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]


def test_messages_tools(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "weather", "input_schema": PARAMETERS}
    choice: Any = {"type": "tool", "name": "weather"}
    fields: Any = {"model": "any", "messages": ASK, "max_tokens": 100, "extra_body": GREEDY, "tools": [tool]}
    answer = claude.messages.create(**fields, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    block = answer.content[-1]
    assert block.type == "tool_use"
    assert block.input["city"] in ("Paris", "Rome")
    with claude.messages.stream(**fields, tool_choice=choice) as stream:
        assert stream.get_final_message().content[-1].input == block.input
    history: Any = [
        *ASK,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "rain"}]},
    ]
    claude.messages.create(model="any", messages=history, max_tokens=5, tools=[tool])


def test_messages_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.messages.create(model="any", messages=[{"role": "user", "content": "word " * 2000}], max_tokens=5)
    assert refused.value.body["error"]["type"] == "invalid_request_error"
    picture: Any = [{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}]
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="any", messages=[{"role": "user", "content": picture}], max_tokens=5)
