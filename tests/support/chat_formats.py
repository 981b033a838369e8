"""How the models of each served architecture mark reasoning and answer: a row for each published
chat template.

A row names the template that it stands for and where it was read: the SHA-256 of its text, or the
file of a public repository that says the same. ``template`` is a short template with the same
markers. ``samples`` are answers of the model, each with its text, its reasoning and its number of
calls.
"""

from typing import NamedTuple

from engine.requests.text.answers.format import ANSWERS, REASONING, Pair

THINK, BRACKETS, SEED, COHERE_THINK = REASONING
ANSWER, RESPONSE, COHERE_RESPONSE = ANSWERS
Sample = tuple[str, tuple[str, str, int]]


class Row(NamedTuple):
    """One published chat template."""

    labels: tuple[str, ...]  # the architectures' names in docs/features.md
    published: str
    source: str
    template: str
    reasoning: Pair | None
    answer: Pair | None
    samples: tuple[Sample, ...]


def turns(*, assistant: str = "assistant", mentions: str = "", opens: str = "") -> str:
    """Return a template with a line for each message. ``mentions`` is text in the template's code,
    never in a prompt; ``opens`` follows the opening of the assistant's turn."""
    return (
        f"{{%- set of_the_model = '{mentions}' -%}}{{%- set called = tools -%}}"
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
        f"{{% if add_generation_prompt %}}<{assistant}>{opens}{{% endif %}}"
    )


CALL = '{"name": "f", "arguments": {"a": 1}}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
# Answers that any model may give; where no marker opens reasoning, all of each is text.
PLAIN: tuple[Sample, ...] = (
    ("Hi.\n", ("Hi.\n", "", 0)),
    ("<think>a</think> b", ("<think>a</think> b", "", 0)),
    ("<answer>b</answer>", ("<answer>b</answer>", "", 0)),
    ('{"name": "Ada", "born": 1815}', ('{"name": "Ada", "born": 1815}', "", 0)),
)
CALLS: tuple[Sample, ...] = (
    (f"So.\n{HERMES}", ("So.", "", 1)),
    (HERMES.replace('"f"', '"other"'), (HERMES.replace('"f"', '"other"'), "", 0)),
)


def thought(pair: Pair = THINK, *, after: str = "\n\n") -> tuple[Sample, ...]:
    """Return answers with reasoning between two markers."""
    opening, closing, _ = pair
    return (
        (f"{opening}\nHm.\n{closing}{after}Hi.", ("Hi.", "Hm.", 0)),
        (f"{opening}Hm, {opening}", ("", f"Hm, {opening}", 0)),
        (f"{opening}{opening}Hm{closing}", ("", "Hm", 0)),
        ("Hi.", ("Hi.", "", 0)),
        (f"Write {opening}.", (f"Write {opening}.", "", 0)),
    )


def going_on(pair: Pair = THINK) -> tuple[Sample, ...]:
    """Return answers to a prompt whose end has already opened the reasoning."""
    opening, closing, _ = pair
    return (
        (f"\nHm.\n{closing}\n\nHi.", ("Hi.", "Hm.", 0)),
        (f"{opening}\nHm.\n{closing}\n\nHi.", ("Hi.", "Hm.", 0)),
        ("Hm", ("", "Hm", 0)),
    )


def answered(pair: Pair, think: Pair = THINK) -> tuple[Sample, ...]:
    """Return answers with markers around reasoning and around the text."""
    opening, closing, _ = pair
    before = f"{think.opening}\nHm.\n{think.closing}"
    return (
        (f"{before}\n{opening}\nHi.\n{closing}\n", ("Hi.", "Hm.", 0)),
        (f"{before}{opening}Hi.{closing}", ("Hi.", "Hm.", 0)),
        (f"{before}\nHi.", ("Hi.", "Hm.", 0)),
        (f"{opening}Hi {closing} and so on", (f"Hi {closing} and so on", "", 0)),
        (f"{opening}\nHi", ("Hi", "", 0)),
        (f"Hi{closing}", (f"Hi{closing}", "", 0)),
        (f"{before}Say {opening}x{closing}", (f"Say {opening}x{closing}", "Hm.", 0)),
    )


LLAMA_CPP = "ggml-org/llama.cpp:src/llama-chat.cpp"
QWEN3 = turns(mentions="<think></think><tool_call>")

ROWS = (
    Row(("Llama",), "meta-llama/Llama-3.1-8B-Instruct",
        "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65",
        turns(mentions='{"name": function name, "parameters": dictionary of argument name}'),
        None, None,
        (*PLAIN, ('{"name": "f", "parameters": {}}', ("", "", 1)),
         ('{"name": "f"}', ('{"name": "f"}', "", 0)))),
    Row(("Llama", "Qwen2"), "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "dd2675619a64a449cdcdd2b93e605a0a50764cee41e344f244752bc93643936c",
        turns(mentions="</think>", opens="<think>\n"), THINK, None, going_on()),
    Row(("Qwen2",), "Qwen/Qwen2.5-7B-Instruct",
        "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f",
        turns(mentions="<tool_call></tool_call>"), None, None, (*PLAIN, *CALLS)),
    Row(("Qwen2",), "Qwen/QwQ-32B",
        "5ed15374ce53e19a7798710736a2c9fe41c79f7385e8421a2080d6575a80ef1b",
        QWEN3, THINK, None, (*thought(), *CALLS)),
    Row(("Qwen3",), "Qwen/Qwen3-0.6B",
        "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5",
        QWEN3, THINK, None,
        (*thought(), *CALLS, (f"<think>Hm</think>\n{HERMES}", ("", "Hm", 1)))),
    Row(("Qwen3-MoE",), "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326",
        turns(mentions="<tool_call></tool_call>"), None, None, (*PLAIN, *CALLS)),
    Row(("Qwen3-Next", "Qwen3.5 (text)"), "Qwen/Qwen3.5-4B",
        "a4aee8afcf2e0711942cf848899be66016f8d14a889ff9ede07bca099c28f715",
        turns(mentions="<think></think><tool_call><function=", opens="<think>\n"),
        THINK, None, going_on()),
    Row(("Qwen2-MoE",), "Qwen/Qwen1.5-MoE-A2.7B-Chat (ChatML)", LLAMA_CPP,
        turns(), None, None, PLAIN),
    Row(("Mistral",), "mistralai/Mistral-Nemo-Instruct-2407",
        "e4676cb56dffea7782fd3e2b577cfaf1e123537e6ef49b3ec7caa6c095c62272",
        turns(mentions="[TOOL_CALLS]"), None, None,
        (*PLAIN, (f"[TOOL_CALLS][{CALL}]", ("", "", 1)))),
    Row(("Mixtral", "Ministral"), "mistralai/Ministral-8B-Instruct-2410 (v3-tekken)", LLAMA_CPP,
        turns(mentions="[TOOL_CALLS]"), None, None, PLAIN),
    Row(("Ministral 3", "Mistral"), "mistralai/Ministral-3-14B-Reasoning-2512",
        "39f03c383413f531fd302c06c7e982ad98c83f0657a8339ae25478ccb81fdcda",
        turns(mentions="[THINK][TOOL_CALLS][ARGS]"), BRACKETS, None,
        (*thought(BRACKETS, after=""),
         ('[THINK]Hm[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}', ("", "Hm", 1)),
         ("[TOOL_CALLS]other[ARGS]{}", ("[TOOL_CALLS]other[ARGS]{}", "", 0)))),
    Row(("Phi-3",), "microsoft/Phi-3.5-mini-instruct",
        "78d976a442bcde2f0be15aafbb8e3050e1104f86732266f68403251b89982a90",
        turns(), None, None, PLAIN),
    Row(("Gemma", "Gemma 2"), "google/gemma-2-2b-it",
        "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6",
        turns(assistant="model"), None, None, PLAIN),
    Row(("Gemma 3 (text)", "Gemma 3"), "google/gemma-3-4b-it",
        "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4",
        turns(assistant="model"), None, None, PLAIN),
    Row(("OLMo", "OLMo 2"), "allenai/OLMo-2-1124-7B-Instruct (Zephyr's form)", LLAMA_CPP,
        turns(), None, None, PLAIN),
    Row(("OLMo 3",), "allenai/Olmo-3-7B-Think (no closing marker)",
        "vllm-project/vllm:vllm/reasoning/olmo3_reasoning_parser.py",
        turns(opens="<think>"), THINK, None, going_on()),
    Row(("Granite",), "ibm-granite/granite-3.3-2b-instruct",
        "3c71df5f659987462c882bf9e295b597dc19902467a7312ea382c5896681bc02",
        turns(mentions="between <think></think> and <response></response>"), THINK, RESPONSE,
        (*thought(), *answered(RESPONSE))),
    Row(("Granite 4 (hybrid)",), "ibm-granite/granite-4.0-h-tiny",
        "jesus-talavera-ibm/llama.cpp:models/templates/ibm-granite-granite-4.0.jinja",
        turns(mentions="<tool_call></tool_call>"), None, None, (*PLAIN, *CALLS)),
    Row(("SmolLM3",), "HuggingFaceTB/SmolLM3-3B",
        "19eacf64569032f07644ea92c8e2a87af06ee7008147557302c31e474912ca97",
        turns(mentions="<think></think>"), THINK, None, thought()),
    Row(("EXAONE 4",), "LGAI-EXAONE/EXAONE-4.0-1.2B", LLAMA_CPP,
        QWEN3, THINK, None, (*thought(), *CALLS)),
    Row(("Seed-OSS",), "ByteDance-Seed/Seed-OSS-36B-Instruct",
        "3f9e0dc4adeb8032287d0129dc75b6298fee8698a52ab41e863dbc89929330d3",
        turns(mentions="<seed:think></seed:think><seed:tool_call><function="), SEED, None,
        (*thought(SEED, after=""),
         ("<seed:think>Hm</seed:think><seed:tool_call>\n<function=f>\n</function>",
          ("", "Hm", 1)))),
    Row(("GPT-OSS",), "openai/gpt-oss-120b",
        "a4c9919cbbd4acdd51ccffe22da049264b1b73e59055fa58811a99efbd7c8146",
        "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
        "<|end|>{% endfor %}{{ '' and tools and '<|channel|>' }}<|start|>assistant", None, None,
        (("<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
          ("Hi", "Hm", 0)),
         ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
          ("", "", 1)),
         ("<|channel|>analysis?Hm<|end|><|start|>assistant<|channel|>final<|message|>Hi",
          ("Hi", "?Hm", 0)))),
    Row(("LFM2",), "LiquidAI/LFM2-8B-A1B",
        "2294f49b51a0b9a1b0194add3f124237b5bd986599f43180eec49bba4de01365",
        turns(), None, None, PLAIN),
    Row(("LFM2",), "LiquidAI/LFM2.5-1.2B-Thinking",
        "6d65c8804847ad74eea912dd7eca3dc1cf7a457b53a77f47d841a14121910963",
        turns(mentions="</think>"), THINK, None, thought()),
    Row(("GPT-2", "OPT", "GPT-NeoX", "Phi", "StarCoder2", "Bamba"), "none of the base models", "",
        turns(), None, None, PLAIN),
    Row(("Cohere",), "CohereForAI/c4ai-command-r-v01",
        "90c33aee14aa2a226127516d48ee9184c9b90745d4a04c484621ec2e82fb712c",
        turns(), None, None, PLAIN),
    Row(("Cohere 2",), "CohereForAI/c4ai-command-r7b-12-2024, tool_use",
        "cc60b553279347d83df761f5dc55b4b2fb66bc1fa9a33e219911c13c11552fac",
        turns(mentions="<|START_THINKING|><|END_THINKING|><|START_RESPONSE|><|END_RESPONSE|>"),
        COHERE_THINK, COHERE_RESPONSE,
        (*thought(COHERE_THINK), *answered(COHERE_RESPONSE, COHERE_THINK))),
    Row(("Cohere 2",), "CohereForAI/c4ai-command-r7b-12-2024",
        "2147c474f41b522b7296f74692b9f31e45f49a31465960576a9d321339c5915a",
        turns(mentions="<|START_RESPONSE|><|END_RESPONSE|>", opens="<|START_RESPONSE|>"),
        None, COHERE_RESPONSE,
        (("Hi.<|END_RESPONSE|>", ("Hi.", "", 0)), ("Hi", ("Hi", "", 0)),
         ("<|START_RESPONSE|>Hi.<|END_RESPONSE|>", ("Hi.", "", 0)))),
    Row(("GLM", "GLM-4"), "THUDM/GLM-4-9B-0414", LLAMA_CPP, turns(), None, None, PLAIN),
    Row(("GLM-4",), "THUDM/GLM-Z1-9B-0414", LLAMA_CPP,
        turns(mentions="</think>", opens="<think>\n"), THINK, None, going_on()),
    Row(("Hunyuan (dense)",), "tencent/Hunyuan-7B-Instruct",
        "vllm-project/vllm:vllm/reasoning/hunyuan_a13b_reasoning_parser.py",
        turns(mentions="<|startoftext|><|extra_4|>", opens="<|extra_0|>"), THINK, ANSWER,
        (*thought(), *answered(ANSWER))),
    Row(("Hunyuan (dense)",), "tencent/Hunyuan-1.8B-Instruct", LLAMA_CPP,
        turns(assistant="｜hy_Assistant｜"), THINK, ANSWER, (*thought(), *answered(ANSWER))),
    Row(("ERNIE 4.5 (dense)",), "baidu/ERNIE-4.5-21B-A3B-Thinking",
        "vllm-project/vllm:vllm/reasoning/ernie45_reasoning_parser.py",
        turns(mentions="</think><response></response><tool_call>", opens="<think>\n"),
        THINK, RESPONSE,
        (*going_on(), ("Hm\n</think>\n\n\n<response>\nHi\n</response>\n", ("Hi", "Hm", 0)),
         ("Hm\n</think>\nHi", ("Hi", "Hm", 0)),
         (f"Hm</think>\n\n<response>So.</response>\n{HERMES}", ("So.", "Hm", 1)),
         (f"Hm</think>\n\n{HERMES}\n", ("", "Hm", 1)))),
    Row(("ERNIE 4.5 (dense)",), "baidu/ERNIE-4.5-0.3B-PT",
        "vllm-project/vllm:vllm/reasoning/ernie45_reasoning_parser.py",
        turns(), None, None, PLAIN),
    Row(("Falcon-H1",), "tiiuae/Falcon-H1-7B-Instruct (ChatML)", LLAMA_CPP,
        turns(mentions="<tool_call></tool_call>"), None, None, (*PLAIN, *CALLS)),
    Row(("LLaVA",), "llava-hf/llava-1.5-7b-hf (Vicuna's form)", LLAMA_CPP,
        turns(), None, None, PLAIN),
    Row(("LLaVA-Next",), "llava-hf/llava-v1.6-mistral-7b-hf",
        "2c17243a977fd0643fb549a509a8e2684f45517df0f9f608d5893b719f16569f",
        turns(), None, None, PLAIN),
    Row(("Idefics 3",), "HuggingFaceM4/Idefics3-8B-Llama3",
        "0d7e56ca41705b79932de707b22bc855c3cfcefae62f1ac5e458560654883d2e",
        turns(assistant="Assistant"), None, None, PLAIN),
    Row(("SmolVLM",), "HuggingFaceTB/SmolVLM-256M-Instruct", LLAMA_CPP,
        turns(assistant="Assistant"), None, None, PLAIN),
    Row(("Qwen2-VL", "Qwen2.5-VL"), "Qwen/Qwen2.5-VL-7B-Instruct",
        "a0bc6f6fc7a29a80017a433e8f03a1cc1236e838a944a2d034295a60c4f2fddb",
        turns(), None, None, PLAIN),
    Row(("Qwen3-VL",), "Qwen/Qwen3-VL-4B-Instruct",
        "3636d0f0bd6bef02654cdffdc447b79cb2cef8ab02cc75267345946291a489e4",
        turns(mentions="<tool_call></tool_call>"), None, None, (*PLAIN, *CALLS)),
)  # fmt: skip
