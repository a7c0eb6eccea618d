"""Drives a running server through the `openai` package: python openai_client.py BASE_URL. Prints OK."""
import json
import sys

import openai

client = openai.OpenAI(base_url=sys.argv[1], api_key="none", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say hello."}]

whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20, seed=1)
assert whole.choices[0].finish_reason in ("stop", "length"), whole
assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

text, usage = "", None
stream = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20, stream=True,
                                        stream_options={"include_usage": True})
for chunk in stream:
    for choice in chunk.choices:
        text += choice.delta.content or ""
    usage = chunk.usage or usage
assert text == whole.choices[0].message.content, (text, whole)
assert usage.completion_tokens == whole.usage.completion_tokens

logprobs = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=3, logprobs=True,
                                          top_logprobs=2).choices[0].logprobs
assert len(logprobs.content) == 3 and len(logprobs.content[0].top_logprobs) == 2

answer = client.chat.completions.create(
    model=model, messages=messages, temperature=0, max_tokens=200,
    response_format={"type": "json_schema", "json_schema": {"name": "greeting", "schema": {
        "type": "object", "properties": {"word": {"type": "string", "maxLength": 12}}, "required": ["word"],
        "additionalProperties": False}}})
if answer.choices[0].finish_reason == "stop":
    assert list(json.loads(answer.choices[0].message.content)) == ["word"]

legacy = client.completions.create(model=model, prompt="one two three", max_tokens=5, temperature=0, logprobs=1, echo=True)
assert legacy.choices[0].text.startswith("one two three")
assert legacy.choices[0].logprobs.token_logprobs[0] is None

own = client.chat.completions.create(model=model, messages=messages, max_tokens=4, temperature=0,
                                     extra_body={"kv": "quest", "kv_check": 1})
assert own.model_extra["timings"]["kv"]["recipe"]

for wrong, kind in (({"n": 2}, openai.BadRequestError), ({"temperature": 9000}, openai.BadRequestError),
                    ({"extra_body": {"nonsense": 1}}, openai.BadRequestError)):
    try:
        client.chat.completions.create(model=model, messages=messages, **wrong)
        raise SystemExit(f"{wrong} was taken")
    except kind as error:
        assert error.body["message"], error
try:
    client.completions.create(model=model, prompt="x " * 20000)
    raise SystemExit("a prompt over the context was taken")
except openai.BadRequestError as error:
    assert error.body["type"] == "exceed_context_size_error" and error.body["n_ctx"] > 0, error.body
try:
    client.embeddings.create(model=model, input="x")
    raise SystemExit("embeddings were given")
except openai.APIStatusError as error:
    assert error.status_code == 501
print("OK")
