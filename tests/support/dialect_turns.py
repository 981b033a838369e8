"""Turns with tool calls, written out in every dialect as the models' chat templates write them.

A row of FAMILIES has a function that writes a turn. Where llama.cpp's source has the family's
template and that template writes calls, ``template`` is its file: for 200 drawn turns the function
and the template write the same, of which tests/support/dialect_turns.json has a digest. The others
are written grammars, by the descriptions in the models' cards and in vLLM's parsers.

    python -m tests.support.dialect_turns DIRECTORY     (llama.cpp's models/templates)

compares all rows with the templates, and writes the digests anew.
"""

import json
import random
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

DIGESTS = Path(__file__).with_suffix(".json")
NUM_TURNS = 200

WORDS = ["Paris", "New York", "Zürich", "東京", "naïve 🌶", "x", "a b  c", "0x1F"]
TEXTS = [*WORDS, "", "true", "42", "null", 'it is {"a": [1, 2}', "a < b && c > d", "</b>", "<br/>"]
TEXTS += [
    "first\nsecond",
    "\nline\n",
    " padded ",
    'say "hi"',
    "it's",
    "C:\\new",
    "tab\there",
    "}]),;",
]
PROSE = ["Let me look.", 'I will check {both} of "them".', "Ich prüfe 東京.", "So:\n\n- one\n- two"]
THOUGHTS = ["Hm.", "The user wants 2 < 3.\n\nSo I call {f}.", "考える…"]
NAMES = ["get_weather", "add-up.2", "now", "search"]


class Turn(NamedTuple):
    """What an assistant's turn says. A call is a name and arguments."""

    reasoning: str
    text: str
    calls: list[tuple[str, dict[str, Any]]]


class Drawn(NamedTuple):
    """A drawn turn, and the schemas of the functions that it may call."""

    functions: dict[str, dict[str, Any]]
    turn: Turn


class Family(NamedTuple):
    """A family of models: its dialect, how it writes a turn, and what its turns may have."""

    dialect: str
    write: Callable[[Turn], str]
    template: str = ""
    head: str = ""  # what the template writes before the turn, and behind it
    tail: str = ""
    think: tuple[str, str] | None = None  # the markers of its reasoning
    has_text: bool = True  # beside calls
    most_calls: int = 3
    texts: list[str] = TEXTS  # that its values may have
    has_null: bool = True
    reasoning_key: str = "reasoning_content"
    is_open: bool = False  # the prompt has opened the reasoning


def draw(family: Family, seed: int) -> Drawn:
    """Return a drawn turn of a family."""
    rng = random.Random(f"{family.dialect} {seed}")
    functions, values = {}, {}
    for name in NAMES[: rng.randint(1, len(NAMES))]:
        drawn = {
            key: _draw_value(rng, family, 0)
            for key in rng.sample(
                ["city", "days", "tags", "note", "opts", "flag"], rng.randint(0, 4)
            )
        }
        functions[name] = {
            "type": "object",
            "properties": {key: schema for key, (schema, _) in drawn.items()},
        }
        values[name] = drawn
    calls = []
    for _ in range(rng.randint(1, family.most_calls)):
        name = rng.choice(list(functions))
        own = {key: _again(rng, family, schema) for key, (schema, _) in values[name].items()}
        calls.append((name, own))
    reasoning = rng.choice(["", *THOUGHTS]) if family.think else ""
    return Drawn(functions, Turn(reasoning, _text(rng, family), calls))


def _text(rng: random.Random, family: Family) -> str:
    return rng.choice(["", *PROSE]) if family.has_text else ""


def _draw_value(rng: random.Random, family: Family, depth: int) -> tuple[dict[str, Any], Any]:
    """Return a schema and a value that it accepts."""
    kinds = ["string", "string", "integer", "number", "boolean", "enum"]
    kinds += ["null", "union"] if family.has_null else []
    kinds += ["array", "object"] if depth < 2 else []
    kind = rng.choice(kinds)
    schema: dict[str, Any] = {"type": kind}
    if kind == "enum":
        schema = {"enum": WORDS[:3]}
    elif kind == "null":
        schema = {"type": ["integer", "null"]}
    elif kind == "union":
        schema = {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": WORDS[:3]}]}
    elif kind == "array":
        schema["items"] = _draw_value(rng, family, depth + 1)[0]
    elif kind == "object":
        keys = rng.sample(["a", "unit", "größe"], rng.randint(0, 3))
        schema["properties"] = {key: _draw_value(rng, family, depth + 1)[0] for key in keys}
    return schema, _again(rng, family, schema)


def _again(rng: random.Random, family: Family, schema: dict[str, Any]) -> Any:
    """Return another value that a drawn schema accepts."""
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "anyOf" in schema:
        return _again(rng, family, rng.choice(schema["anyOf"]))
    kind = schema["type"]
    if kind == "string":
        return rng.choice(family.texts)
    if kind == "integer":
        return rng.choice([0, -7, 42, 10**20])
    if kind == "number":
        return rng.choice([0.5, -3.25, 1e-7, 6.02e23])
    if kind == "boolean":
        return rng.random() < 0.5
    if isinstance(kind, list):
        return rng.choice([None, 3])
    if kind == "array":
        return [_again(rng, family, schema["items"]) for _ in range(rng.randint(0, 3))]
    return {key: _again(rng, family, one) for key, one in schema["properties"].items()}


# ---- how turns are written


def dumps(value: Any) -> str:
    """Return JSON as the templates' filter writes it."""
    return json.dumps(value, ensure_ascii=False)


def _as_object(name: str, arguments: dict[str, Any], key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {dumps(arguments)}}}'


def _hermes(turn: Turn) -> str:
    calls = [f"<tool_call>\n{_as_object(*call)}\n</tool_call>" for call in turn.calls]
    return "\n".join([turn.text] * bool(turn.text) + calls)


def _qwen3(turn: Turn) -> str:
    return f"<think>\n{turn.reasoning}\n</think>\n\n{_hermes(turn)}"


def _python_or_json(value: Any) -> str:
    return dumps(value) if isinstance(value, dict | list) else str(value)


def _qwen3_coder(turn: Turn) -> str:
    text = f"{turn.text}\n" if turn.text else ""
    for index, (name, arguments) in enumerate(turn.calls):
        text += "\n" * bool(index or turn.text) + f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            text += f"<parameter={key}>\n{_python_or_json(value)}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text


def _seed_oss(turn: Turn) -> str:
    parts = [f"<seed:think>{turn.reasoning}</seed:think>"] if turn.reasoning else []
    parts += [f"{turn.text}\n"] if turn.text else []
    for name, arguments in turn.calls:
        call = f"<seed:tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            call += f"<parameter={key}>{value}</parameter>\n"
        parts.append(f"{call}</function>\n</seed:tool_call>")
    return "\n".join(parts)


def _glm(turn: Turn) -> str:
    text = f"\n<think>{turn.reasoning}</think>" + (f"\n{turn.text}" if turn.text else "")
    for name, arguments in turn.calls:
        text += f"\n<tool_call>{name}\n"
        for key, value in arguments.items():
            written = value if isinstance(value, str) else dumps(value)
            text += f"<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n"
        text += "</tool_call>"
    return text


def _glm_47(turn: Turn) -> str:
    text = f"<think>{turn.reasoning}</think>" if turn.reasoning else "</think>"
    text += turn.text
    for name, arguments in turn.calls:
        text += f"<tool_call>{name}"
        for key, value in arguments.items():
            written = value if isinstance(value, str) else dumps(value)
            text += f"<arg_key>{key}</arg_key><arg_value>{written}</arg_value>"
        text += "</tool_call>"
    return text


def _minimax(turn: Turn) -> str:
    text = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    text += f"{turn.text}\n<minimax:tool_call>\n"
    for name, arguments in turn.calls:
        text += f'<invoke name="{name}">\n'
        for key, value in arguments.items():
            written = value if isinstance(value, str) else dumps(value)
            text += f'<parameter name="{key}">{written}</parameter>\n'
        text += "</invoke>\n"
    return f"{text}</minimax:tool_call>"


def _deepseek(turn: Turn) -> str:
    calls = "".join(
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in turn.calls
    )
    return f"{turn.text}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def _deepseek_v3(turn: Turn) -> str:
    calls = "\n".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{dumps(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in turn.calls
    )
    return f"{turn.text}<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>"


def _kimi(turn: Turn) -> str:
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
        f"{dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(turn.calls)
    )
    return f"{turn.text}<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>"


def _cohere(turn: Turn) -> str:
    calls = ",\n".join(
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {dumps(own)}}}'
        for index, (name, own) in enumerate(turn.calls)
    )
    before = f"<|START_THINKING|>{turn.reasoning}<|END_THINKING|>"
    return f"{before}<|START_ACTION|>[\n{calls}\n]<|END_ACTION|>"


def _mistral(turn: Turn) -> str:
    calls = [
        f'{_as_object(*call)[:-1]}, "id": "call0000{index}"}}'
        for index, call in enumerate(turn.calls)
    ]
    return f"[TOOL_CALLS][{', '.join(calls)}]"


def _mistral_ids(turn: Turn) -> str:
    return "".join(
        f"[TOOL_CALLS]{name}[CALL_ID]call0000{index}[ARGS]{dumps(arguments)}"
        for index, (name, arguments) in enumerate(turn.calls)
    )


def _mistral_named(turn: Turn) -> str:
    return turn.text + "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(own)}" for name, own in turn.calls)


def _llama(turn: Turn) -> str:
    return _as_object(*turn.calls[0], "parameters")


def _llama_several(turn: Turn) -> str:
    calls = "; ".join(_as_object(*call, "parameters") for call in turn.calls)
    return f"<|python_tag|>{calls}"


def _channels(turn: Turn) -> str:
    name, arguments = turn.calls[0]
    before = f"<|start|>assistant<|channel|>analysis<|message|>{turn.reasoning}<|end|>"
    return (
        f"{before if turn.reasoning else ''}<|start|>assistant to=functions.{name}"
        f"<|channel|>commentary json<|message|>{dumps(arguments)}<|call|>"
    )


def _lfm2(turn: Turn) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"'{value}'"  # without escapes
        return dumps(value) if isinstance(value, dict) else str(value)

    return _pythonic_calls(turn, written, "<|tool_call_start|>", "<|tool_call_end|>")


def _pythonic_calls(turn: Turn, written: Callable[[Any], str], before: str, after: str) -> str:
    calls = [
        f"{name}({', '.join(f'{key}={written(value)}' for key, value in arguments.items())})"
        for name, arguments in turn.calls
    ]
    return f"{turn.text}{before}[{', '.join(calls)}]{after}"


def _pythonic(turn: Turn) -> str:
    return _pythonic_calls(turn, repr, "", "")


def _pythonic_of_json(turn: Turn) -> str:
    return _pythonic_calls(turn, dumps, "", "")


def _gemma(turn: Turn, quote: str, before: str, after: str) -> str:
    def written(value: Any) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, dict):
            return f"{{{pairs(value)}}}"
        return f"[{','.join(map(written, value))}]" if isinstance(value, list) else str(value)

    def pairs(values: dict[str, Any]) -> str:
        ordered = sorted(values, key=lambda key: key.lower())
        return ",".join(f"{key}:{written(values[key])}" for key in ordered)

    calls = [f"{before}call:{name}{{{pairs(own)}}}{after}" for name, own in turn.calls]
    return "".join(calls)


def _function_gemma(turn: Turn) -> str:
    calls = _gemma(turn, "<escape>", "<start_function_call>", "<end_function_call>")
    return f"{turn.text}{calls}"


def _gemma_4(turn: Turn) -> str:
    return _gemma(turn, '<|"|>', "<|tool_call>", "<tool_call|>")


def _listed(turn: Turn, opening: str, closing: str) -> str:
    calls = ", ".join(_as_object(*call) for call in turn.calls)
    return f"{turn.text}{opening}[{calls}]{closing}"


PLAIN_TEXTS = [text for text in TEXTS if "\\" not in text]  # LFM2's template escapes nothing
THINK = ("<think>", "</think>")
FAMILIES = {
    "Qwen 2.5": Family(
        "hermes", _hermes, "Qwen-Qwen2.5-7B-Instruct.jinja", "<|im_start|>assistant\n",
        "<|im_end|>\n",
    ),
    "Qwen 3": Family(
        "hermes", _qwen3, "Qwen-Qwen3-0.6B.jinja", "<|im_start|>assistant\n", "<|im_end|>\n", THINK
    ),
    "Granite 4": Family(
        "hermes", _hermes, "ibm-granite-granite-4.0.jinja",
        "<|start_of_role|>assistant<|end_of_role|>", "<|end_of_text|>\n",
    ),
    "Qwen3-Coder": Family(
        "qwen3-coder", _qwen3_coder, "Qwen3-Coder.jinja", "<|im_start|>assistant\n", "<|im_end|>\n"
    ),
    "Seed-OSS": Family(
        "seed-oss", _seed_oss, "ByteDance-Seed-OSS.jinja", "<seed:bos>assistant\n", "<seed:eos>",
        ("<seed:think>", "</seed:think>"),
    ),
    "GLM 4.6": Family("glm", _glm, "GLM-4.6.jinja", "<|assistant|>", "", THINK),
    "GLM 4.7": Family(
        "glm", _glm_47, "GLM-4.7-Flash.jinja", "<|assistant|>", "", THINK, is_open=True
    ),
    "MiniMax M2": Family(
        "minimax-m2", _minimax, "MiniMax-M2.jinja", "]~b]ai\n", "[e~[\n", THINK
    ),
    "DeepSeek V3.1": Family(
        "deepseek-v3.1", _deepseek, "deepseek-ai-DeepSeek-V3.1.jinja",
        "<｜Assistant｜><think></think>", "<｜end▁of▁sentence｜>",
    ),
    "DeepSeek V3": Family("deepseek-v3", _deepseek_v3),
    "Kimi K2": Family(
        "kimi-k2", _kimi, "moonshotai-Kimi-K2.jinja", "<|im_assistant|>assistant<|im_middle|>",
        "<|im_end|>",
    ),
    "Command R7B": Family(
        "cohere", _cohere, "CohereForAI-c4ai-command-r7b-12-2024-tool_use.jinja",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>", "<|END_OF_TURN_TOKEN|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"), has_text=False,
    ),
    "Mistral Nemo": Family(
        "mistral", _mistral, "mistralai-Mistral-Nemo-Instruct-2407.jinja", "", "</s>",
        has_text=False,
    ),
    "Mistral Small 3.2": Family(
        "mistral-ids", _mistral_ids, "Mistral-Small-3.2-24B-Instruct-2506.jinja", "", "</s>",
        has_text=False,
    ),
    "Ministral 3": Family(
        "mistral-named", _mistral_named, "mistralai-Ministral-3-14B-Reasoning-2512.jinja", "",
        "</s>",
    ),
    "Llama 3.2": Family(
        "llama", _llama, "meta-llama-Llama-3.2-3B-Instruct.jinja",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>", has_text=False,
        most_calls=1,
    ),
    "Llama 3, several": Family("llama", _llama_several, has_text=False),
    "GPT-OSS": Family(
        "channels", _channels, "openai-gpt-oss-120b.jinja", has_text=False, most_calls=1,
        think=("", ""), reasoning_key="thinking",
    ),
    "LFM2.5": Family(
        "lfm2", _lfm2, "LFM2.5-8B-A1B.jinja", "<|im_start|>assistant\n", "<|im_end|>\n",
        texts=PLAIN_TEXTS,
    ),
    "Gemma 4": Family(
        "gemma4", _gemma_4, "google-gemma-4-31B-it.jinja", "<|turn>model\n", "<|tool_response>",
        has_text=False, has_null=False,
    ),
    "FunctionGemma": Family("gemma", _function_gemma, has_null=False),
    "Llama 3.2 and 4, pythonic": Family("pythonic", _pythonic, has_text=False),
    "Gemma 3, pythonic": Family("pythonic", _pythonic_of_json, has_text=False),
    "Granite 3": Family("granite", lambda turn: _listed(turn, "<|tool_call|>", "")),
    "Phi-4-mini": Family("phi-4", lambda turn: _listed(turn, "functools", "")),
    "Phi-4-mini, marked": Family(
        "phi-4-marked", lambda turn: _listed(turn, "<|tool_call|>", "<|/tool_call|>")
    ),
}  # fmt: skip


# vLLM's parsers, of which tests.support.vllm_calls records what they return.
PARSERS = {  # without Mistral's and GPT-OSS', which need tokenizers of their own
    "Qwen 2.5": "hermes",
    "Granite 4": "granite4",
    "Qwen3-Coder": "qwen3_coder",
    "Seed-OSS": "seed_oss",
    "GLM 4.6": "glm45",
    "GLM 4.7": "glm47",
    "MiniMax M2": "minimax_m2",
    "DeepSeek V3.1": "deepseek_v31",
    "DeepSeek V3": "deepseek_v3",
    "Kimi K2": "kimi_k2",
    "Llama 3.2": "llama3_json",
    "LFM2.5": "lfm2",
    "Gemma 4": "gemma4",
    "FunctionGemma": "functiongemma",
    "Llama 3.2 and 4, pythonic": "pythonic",
    "Gemma 3, pythonic": "pythonic",
    "Granite 3": "granite",
    "Phi-4-mini": "phi4_mini_json",
}
RECORDED = Path(__file__).with_name("vllm_calls.json")


def digest_of(family: Family) -> str:
    """Return the digest of a family's drawn turns, as the row writes them."""
    texts = [family.write(draw(family, seed).turn) for seed in range(NUM_TURNS)]
    return sha256("\0".join(texts).encode()).hexdigest()


def by_template(family: Family, template: str, drawn: Drawn) -> str:
    """Return a turn as the family's template writes it."""
    from engine.worker.tokenizing.call_turns import form_of, in_form
    from engine.worker.tokenizing.templates import render

    special: dict[str, object] = {"bos_token": "", "eos_token": "</s>"}
    turn = drawn.turn
    calls = [
        {"id": f"call0000{index}", "type": "function", "function": {"name": name, "arguments": own}}
        for index, (name, own) in enumerate(turn.calls)
    ]
    tools: list[dict[str, object]] = [
        {"type": "function", "function": {"name": name, "description": "f", "parameters": schema}}
        for name, schema in drawn.functions.items()
    ]
    said = {"role": "assistant", "content": turn.text, "tool_calls": calls}
    if family.think:
        said[family.reasoning_key] = turn.reasoning
    ask: dict[str, object] = {"role": "user", "content": "q"}
    own = in_form(said, form_of(template, tuple(special.items())))  # type: ignore[arg-type]
    before = render(template, [ask], tools, special, add_generation_prompt=False)
    after = render(template, [ask, own], tools, special, add_generation_prompt=False)
    same = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(before)
    )
    if not family.head:
        return after[same:]
    return after[after.rfind(family.head, 0, same + len(family.head)) + len(family.head) :]


def main(directory: Path) -> None:
    """Compare every row with its template, and write the digests."""
    digests = {}
    for name, family in FAMILIES.items():
        if family.template:
            template = (directory / family.template).read_text()
            for seed in range(NUM_TURNS):
                drawn = draw(family, seed)
                expected = by_template(family, template, drawn)
                written = family.write(drawn.turn) + family.tail
                assert expected.startswith(written), (name, seed, expected, written)
        digests[name] = digest_of(family)
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
