"""Asks vLLM's tool parsers for the calls of drawn turns, and writes where they differ from the
turns.

    PYTHON -m tests.support.vllm_calls FILE     (in vLLM's environment)

The environment is the one that ``python -m tools.lab.peers install vllm`` makes. FILE is
tests/support/vllm_calls.json: for each family the digest of the turns, and the numbers of those in
which its parser did not return the calls that were written.
"""

import json
import re
import sys
from pathlib import Path

from tests.support.dialect_turns import FAMILIES, NUM_TURNS, PARSERS, digest_of, draw


def main(file: Path) -> None:
    """Write what every parser returns."""
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    recorded = {}
    for name, parser in PARSERS.items():
        family = FAMILIES[name]
        tokenizer = PreTrainedTokenizerFast(tokenizer_file="engine/demo/stories/tokenizer.json")
        turn = draw(family, 0).turn
        markers = [*(family.think or ()), "<|python_tag|>", *_markers_in(family.write(turn))]
        tokenizer.add_tokens(list(dict.fromkeys(markers)))
        differs = []
        for seed in range(NUM_TURNS):
            functions, turn = draw(family, seed)
            tools = [
                {"type": "function", "function": {"name": called, "parameters": schema}}
                for called, schema in functions.items()
            ]
            request = ChatCompletionRequest(
                model="m", messages=[{"role": "user", "content": "q"}], tools=tools
            )
            text = family.write(turn)
            if family.think and family.think[1] in text:
                text = text.partition(family.think[1])[2]
            try:
                made = ToolParserManager.get_tool_parser(parser)(tokenizer, request.tools)
                found = made.extract_tool_calls(text, request)
                calls = [
                    (call.function.name, json.loads(call.function.arguments))
                    for call in found.tool_calls
                ]
            except Exception as error:
                sys.stderr.write(f"{name} {seed}: {type(error).__name__}: {error}\n"[:300])
                calls = []
            if calls != turn.calls:
                differs.append(seed)
        recorded[name] = {"turns": digest_of(family), "differs": differs}
        sys.stderr.write(f"{name}: {len(differs)} of {NUM_TURNS} differ\n")
    file.write_text(json.dumps(recorded) + "\n")


def _markers_in(text: str) -> list[str]:
    return re.findall(r"</?[|｜\w:▁]+>", text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
