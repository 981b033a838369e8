"""Cases by the programs that speak OpenAI's API: `openai`, LangChain, LiteLLM and `llm`.

Reads one JSON object: ``base_url`` of a server, ``keyed_url`` of one that wants the key ``key``,
a ``tool``, and the bytes of an ``image`` in base64. Prints one JSON object: the result of each case
by its name, or ``{"raised": CLASS, "text": …}`` for a case that failed.
"""

import asyncio
import base64
import json
import os
import struct
import subprocess
import sys
import time
from pathlib import Path

import litellm
import openai
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel

ASKED = json.load(sys.stdin)
URL, KEYED, KEY, TOOL = (ASKED[name] for name in ("base_url", "keyed_url", "key", "tool"))
TURNS = [{"role": "user", "content": "Tell me a story."}]
SEEDED = {"model": "stories", "seed": 7, "max_tokens": 12}
CALLED = {"type": "function", "function": {"name": "look_up"}}
TEXTS = ["The dog sleeps by the fire.", "A ship left at dawn."]
LONG = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
CASES = {}

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=60)


class Size(BaseModel):
    """A form of an answer."""

    width: int


def case(make):
    """Add a case by its function's name."""
    CASES[make.__name__] = make
    return make


def chat(**args):
    """Return an answer of chat.completions."""
    return client.chat.completions.create(**SEEDED | {"messages": TURNS} | args)


def raised(call):
    """Return the class and some fields of the error that a call raises."""
    try:
        call()
    except Exception as error:
        names = ("status_code", "code", "param", "type")
        return [type(error).__name__, *[getattr(error, name, None) for name in names]]
    return ["nothing"]


def is_idle():
    """Return whether the server runs no request, within two seconds."""
    for _ in range(100):
        text = client.with_options(base_url=URL.removesuffix("/v1")).get("/metrics", cast_to=str)
        running = [line for line in text.splitlines() if line.startswith("triolet:num_requests_r")]
        if all(line.endswith(" 0.0") for line in running):
            return True
        time.sleep(0.02)
    return False


# ---- openai: chats


@case
def models():
    return [model.id for model in client.models.list()]


@case
def model():
    return client.models.retrieve("stories").owned_by


@case
def whole():
    answer = chat()
    [choice] = answer.choices
    usage = [answer.usage.prompt_tokens, answer.usage.completion_tokens]
    return [choice.message.content, choice.finish_reason, usage]


@case
def streamed():
    parts = list(chat(stream=True))
    ends = [part.choices[0].finish_reason for part in parts if part.choices]
    return ["".join(part.choices[0].delta.content or "" for part in parts), ends[-1]]


@case
def streamed_usage():
    *parts, last = chat(stream=True, stream_options={"include_usage": True})
    return [last.choices, last.usage.completion_tokens, {part.usage for part in parts} == {None}]


@case
def stream_helper():
    with client.chat.completions.stream(**SEEDED, messages=TURNS) as stream:
        return "".join([event.delta for event in stream if event.type == "content.delta"])


@case
def two_choices():
    return [choice.message.content for choice in chat(n=2).choices]


@case
def logprobs():
    entries = chat(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    return [[entry.token, entry.logprob, len(entry.top_logprobs)] for entry in entries]


@case
def stop():
    [choice] = chat(stop=["dragon"]).choices
    return [choice.message.content, choice.finish_reason]


@case
def same_seed():
    return chat(temperature=1.0).choices[0].message == chat(temperature=1.0).choices[0].message


@case
def bias():
    answer = chat(logit_bias={"265": 100}, max_tokens=3)
    return answer.choices[0].message.content


@case
def limit():
    return chat(max_completion_tokens=2, max_tokens=openai.omit).usage.completion_tokens


@case
def schema():
    form = {"name": "size", "schema": {"type": "integer"}, "strict": True}
    answer = chat(response_format={"type": "json_schema", "json_schema": form}, max_tokens=60)
    return isinstance(json.loads(answer.choices[0].message.content), int)


@case
def parsed():
    answer = client.chat.completions.parse(
        **SEEDED | {"max_tokens": 200}, messages=TURNS, response_format=Size
    )
    return isinstance(answer.choices[0].message.parsed.width, int)


@case
def developer():
    turns = [{"role": "developer", "content": "Be kind."}, *TURNS]
    system = [{"role": "system", "content": "Be kind."}, *TURNS]
    return chat(messages=turns).choices[0].message == chat(messages=system).choices[0].message


@case
def extra_fields():
    body = {"top_k": 1, "min_p": 0.1, "structured_outputs": {"choice": ["yes", "no"]}}
    return chat(extra_body=body).choices[0].message.content in ("yes", "no")


@case
def tools():
    [choice] = chat(tools=[TOOL], tool_choice=CALLED, max_tokens=90).choices
    [call] = choice.message.tool_calls
    return [choice.finish_reason, call.function.name, list(json.loads(call.function.arguments))]


@case
def tools_in_two_turns():
    message = chat(tools=[TOOL], tool_choice=CALLED, max_tokens=90).choices[0].message
    found = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a boat"}
    answer = chat(messages=[*TURNS, message, found], tools=[TOOL])
    return bool(answer.choices[0].message.content)


@case
def streamed_tools():
    asked = SEEDED | {"max_tokens": 90, "tools": [TOOL], "tool_choice": CALLED}
    with client.chat.completions.stream(**asked, messages=TURNS) as stream:
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    return [call.function.name, list(json.loads(call.function.arguments))]


@case
def image():
    url = f"data:image/png;base64,{ASKED['image']}"
    parts = [
        {"type": "text", "text": "What do you see?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    answer = chat(model="demo-see", messages=[{"role": "user", "content": parts}])
    return answer.choices[0].message.content


# ---- openai: texts, vectors, rankings


@case
def completion():
    return client.completions.create(**SEEDED, prompt="Once upon a time").choices[0].text


@case
def streamed_completion():
    parts = client.completions.create(**SEEDED, prompt="Once upon a time", stream=True)
    return "".join(part.choices[0].text for part in parts)


@case
def several_prompts():
    answer = client.completions.create(**SEEDED, prompt=["Once upon a time", "The dog"], n=2)
    return [choice.index for choice in answer.choices]


@case
def echo():
    asked = SEEDED | {"max_tokens": 1, "echo": True, "logprobs": 1}
    [choice] = client.completions.create(**asked, prompt="Once upon a time").choices
    return [choice.text.startswith("Once upon a time"), choice.logprobs.token_logprobs[0]]


@case
def vectors():
    answer = client.embeddings.create(model="demo-embed", input=TEXTS)  # in base64, by itself
    return [struct.pack(f"<{len(one.embedding)}f", *one.embedding).hex() for one in answer.data]


@case
def vector_of_floats():
    answer = client.embeddings.create(model="demo-embed", input=TEXTS[0], encoding_format="float")
    [one] = answer.data
    return struct.pack(f"<{len(one.embedding)}f", *one.embedding).hex()


@case
def short_vector():
    answer = client.embeddings.create(model="demo-embed", input=[1, 2, 3], dimensions=8)
    return len(answer.data[0].embedding)


@case
def rerank():
    body = {"model": "demo-rerank", "query": "Where is the dog?", "documents": TEXTS}
    return client.post("/rerank", body=body, cast_to=object)["results"][0]["index"]


@case
def request_id():
    answer = client.chat.completions.with_raw_response.create(
        **SEEDED, messages=TURNS, extra_headers={"X-Request-Id": "of-a-case"}
    )
    return [answer.headers["x-request-id"], answer.parse().id]


# ---- openai: errors and ends


@case
def no_model():
    return raised(lambda: chat(model="none"))


@case
def wrong_value():
    return raised(lambda: chat(temperature=1000))


@case
def unknown_field():
    return raised(lambda: chat(extra_body={"colour": "red"}))


@case
def no_responses():
    return raised(lambda: client.responses.create(model="stories", input="Hi"))


@case
def wrong_key():
    keyed = openai.OpenAI(base_url=KEYED, api_key="wrong", max_retries=0)
    return raised(keyed.models.list)


@case
def over_the_limit():
    keyed = openai.OpenAI(base_url=KEYED, api_key=KEY, max_retries=0)
    asked = {"model": "fake", "prompt": "a", "max_tokens": 500}
    with keyed.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
        return raised(lambda: keyed.completions.create(**asked))


@case
def client_timeout():
    return [raised(lambda: chat(**LONG, timeout=0.2))[0], is_idle()]


@case
def server_deadline():
    headers = {"X-Request-Timeout": "0.2"}
    retrying = client.with_options(max_retries=3)
    began = time.monotonic()
    found = raised(
        lambda: retrying.chat.completions.create(
            **SEEDED | LONG, messages=TURNS, extra_headers=headers
        )
    )
    return [*found[:3], time.monotonic() - began < 2]


@case
def deadline_in_a_stream():
    headers = {"X-Request-Timeout": "0.2"}
    return raised(lambda: list(chat(**LONG, stream=True, extra_headers=headers)))[:1]


@case
def closed_early():
    with chat(**LONG, stream=True) as stream:
        for _ in zip(range(3), stream, strict=False):
            pass
    return is_idle()


@case
def many_at_once():
    async def ask():
        async with openai.AsyncOpenAI(base_url=URL, api_key="none") as many:
            asked = [many.chat.completions.create(**SEEDED, messages=TURNS) for _ in range(8)]
            return {one.choices[0].message.content for one in await asyncio.gather(*asked)}

    return len(asyncio.run(ask()))


@case
def cancelled_task():
    async def ask():
        async with openai.AsyncOpenAI(base_url=URL, api_key="none") as one:
            task = asyncio.create_task(one.chat.completions.create(**SEEDED | LONG, messages=TURNS))
            await asyncio.sleep(0.2)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return task.cancelled()

    return [asyncio.run(ask()), is_idle()]


# ---- LangChain


def langchain(**args):
    """Return LangChain's model."""
    return ChatOpenAI(base_url=URL, api_key="none", **SEEDED | args)


@case
def langchain_chat():
    return langchain().invoke(TURNS[0]["content"]).content


@case
def langchain_stream():
    parts = langchain().stream([HumanMessage(TURNS[0]["content"])])
    return "".join(part.content for part in parts)


@case
def langchain_tools():
    bound = langchain(max_tokens=90).bind_tools([TOOL], tool_choice="look_up")
    [call] = bound.invoke(TURNS[0]["content"]).tool_calls
    return [call["name"], list(call["args"])]


@case
def langchain_form():
    formed = langchain(max_tokens=200).with_structured_output(Size, method="json_schema")
    return isinstance(formed.invoke(TURNS[0]["content"]).width, int)


@case
def langchain_vectors():
    embedding = OpenAIEmbeddings(
        model="demo-embed", base_url=URL, api_key="none", check_embedding_ctx_length=False
    )
    return [struct.pack(f"<{len(one)}f", *one).hex() for one in embedding.embed_documents(TEXTS)]


# ---- LiteLLM

LITE = {"model": "openai/stories", "api_base": URL, "api_key": "none", "seed": 7, "max_tokens": 12}


@case
def litellm_chat():
    return litellm.completion(**LITE, messages=TURNS).choices[0].message.content


@case
def litellm_stream():
    parts = litellm.completion(**LITE, messages=TURNS, stream=True)
    return "".join(part.choices[0].delta.content or "" for part in parts)


@case
def litellm_error():
    return raised(lambda: litellm.completion(**LITE | {"model": "openai/none"}, messages=TURNS))[:2]


@case
def litellm_vectors():
    answer = litellm.embedding("openai/demo-embed", TEXTS, api_base=URL, api_key="none")
    return [
        struct.pack(f"<{len(one['embedding'])}f", *one["embedding"]).hex() for one in answer.data
    ]


# ---- llm


def llm(*args):
    """Return what the command prints."""
    made = subprocess.run(
        [Path(sys.executable).with_name("llm"), *args], capture_output=True, text=True, timeout=60
    )
    return made.stdout.rstrip("\n") or made.stderr


LLM = ("-m", "stories", "--key", "none", "-o", "seed", "7", "-o", "max_tokens", "12")


@case
def llm_stream():
    folder = Path(os.environ["LLM_USER_PATH"])
    entry = f'- {{model_id: stories, model_name: stories, api_base: "{URL}"}}\n'
    (folder / "extra-openai-models.yaml").write_text(entry)
    return llm(*LLM, TURNS[0]["content"])


@case
def llm_whole():
    return llm(*LLM, "--no-stream", TURNS[0]["content"])


def main():
    found = {}
    for name, make in CASES.items():
        try:
            found[name] = make()
        except Exception as error:
            found[name] = {"raised": type(error).__name__, "text": str(error)[:500]}
    assert base64.b64decode(ASKED["image"])
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
