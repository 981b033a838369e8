"""What a Generate request must answer, by stock transformers and written-out definitions.

The oracle gets the sampled tokens, and says for each position which one it would have taken, so
that after a near-tie engine and oracle still have the same text. Logits come from the stock model
over the whole sequence, edits and limits from transformers' processors where it has them, and masks
from llguidance on a matcher of the oracle's own. Noise, stops and texts are written out here.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

MASK_64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # the proto allows this between two parts of JSON


@dataclass(slots=True)
class Verdict:
    """The oracle's choice at one position.

    It has the token that must be there (None: any whose score is finite), by how much that token
    won, and the scores [vocab] from which it was chosen.
    """

    token: int | None
    margin: float
    scores: torch.Tensor


@dataclass(slots=True)
class End:
    """How a choice must end: number of tokens, reason, matched stop string or id, and text."""

    count: int
    reason: str
    matched: str | int | None
    text: str


@dataclass(slots=True)
class Asked:
    """A request in plain words. None and empty values mean unset, as on the wire."""

    prompt: list[int]
    sampling: dict[str, Any]
    constraint: tuple[str, Any] | None = None
    skip_special: bool = True
    room: int = 0  # tokens that fit behind the prompt
    choice: int = 0
    ends: frozenset[int] = field(default_factory=frozenset)

    def get(self, name: str, default: Any) -> Any:
        """Return a sampling option, or ``default`` if it is not set."""
        return self.sampling.get(name, default)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids that stop the output: the request's, and the model's unless ignored."""
        own = frozenset(self.get("stop_token_ids", ()))
        return own if self.get("ignore_eos", False) else own | self.ends

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the output may have."""
        return min(self.get("max_tokens", self.room), self.room)


class GenerationOracle:
    """Compute what a request must answer, with the stock model of a checkpoint."""

    def __init__(self, directory: Path, ends: frozenset[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        )
        self.tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self.chats = AutoTokenizer.from_pretrained(directory)
        self.ends = ends
        text = (directory / "tokenizer.json").read_text("utf-8")
        self._guide = LLTokenizer(text, eos_token=sorted(ends))

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Return a text's token ids, by the tokenizer of the checkpoint."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: list[int], *, skip: bool) -> str:
        """Return the text of token ids."""
        return self.tokenizer.decode(ids, skip_special_tokens=skip)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Return the logits of the next token at every position, [tokens, vocab]."""
        return self.model(torch.tensor([tokens]), use_cache=False).logits[0]

    # ---- tokens

    def verdicts(self, asked: Asked, output: list[int]) -> list[Verdict]:
        """Return one verdict for each token of ``output``, and one for the token after them."""
        logits = self.logits([*asked.prompt, *output])[len(asked.prompt) - 1 :]
        matcher = self.matcher(asked.constraint)
        found = []
        for position, own in enumerate(logits):
            before = output[:position]
            if matcher is not None and matcher.is_stopped():
                break
            scores = self._edited(asked, own, before)
            if matcher is not None:
                scores = self._masked(asked, matcher, scores)
            found.append(self._chosen(asked, scores, position))
            if matcher is not None and position < len(output):
                matcher.consume_token(output[position])
        return found

    def matcher(self, constraint: tuple[str, Any] | None) -> LLMatcher | None:
        """Return a matcher of llguidance for a constraint."""
        if constraint is None:
            return None
        kind, source = constraint
        if kind == "json_object":
            kind, source = "json_schema", '{"type": "object"}'
        if kind == "json_schema":
            options = {"whitespace_pattern": WHITESPACE}
            grammar = LLMatcher.grammar_from_json_schema(source, defaults=options)
        elif kind == "regex":
            grammar = LLMatcher.grammar_from_regex(source)
        elif kind == "choice":
            grammar = LLMatcher.grammar_from_regex("|".join(source))
        else:
            grammar = LLMatcher.grammar_from_lark(source)
        matcher = LLMatcher(self._guide, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def _edited(self, asked: Asked, logits: torch.Tensor, output: list[int]) -> torch.Tensor:
        """Return the logits after all edits, in the order of transformers' `generate`."""
        scores, vocab = logits[None].clone(), len(logits)
        everything = torch.tensor([[*asked.prompt, *output]])
        own = torch.tensor([output], dtype=torch.int64)
        if bias := asked.get("logit_bias", {}):
            pairs = {(token,): float(value) for token, value in bias.items()}
            scores = SequenceBiasLogitsProcessor(pairs)(everything, scores)
        if (penalty := asked.get("repetition_penalty", 1.0)) != 1.0:
            scores = RepetitionPenaltyLogitsProcessor(penalty)(everything, scores)
        for token in set(output):
            scores[0, token] -= asked.get("presence_penalty", 0.0)
            scores[0, token] -= asked.get("frequency_penalty", 0.0) * output.count(token)
        if words := asked.get("bad_words", ()):
            texts = [text for word in words for text in (word, f" {word}")]
            ids = [self.encode(text, special=False) for text in texts]
            scores = NoBadWordsLogitsProcessor(ids)(own, scores)
        suppressed = set(asked.get("banned_token_ids", ()))
        if allowed := asked.get("allowed_token_ids", ()):
            suppressed |= set(range(vocab)) - set(allowed)
        if suppressed:
            scores = SuppressTokensLogitsProcessor(sorted(suppressed))(everything, scores)
        if (least := min(asked.get("min_tokens", 0), asked.max_tokens)) and asked.stop_ids:
            few = MinNewTokensLengthLogitsProcessor(
                len(asked.prompt), least, sorted(asked.stop_ids), device="cpu"
            )
            scores = few(everything, scores)
        return scores[0]

    def _masked(self, asked: Asked, matcher: LLMatcher, scores: torch.Tensor) -> torch.Tensor:
        bits = matcher.compute_bitmask()
        may = torch.tensor([bits[i >> 3] >> (i & 7) & 1 for i in range(len(scores))]).bool()
        ends = torch.zeros(len(scores)).bool()
        ends[sorted(self.ends)] = True
        shut = ~may | ends if asked.get("ignore_eos", False) else ~may
        left = scores.masked_fill(shut, -math.inf)
        if bool((left == -math.inf).all()):
            left[may & ends] = 0.0
        return left

    def _chosen(self, asked: Asked, scores: torch.Tensor, position: int) -> Verdict:
        temperature = asked.get("temperature", 1.0)
        if temperature == 0.0:
            best = scores.topk(2)
            return Verdict(int(best.indices[0]), float(best.values[0] - best.values[1]), scores)
        wide = TemperatureLogitsWarper(temperature)(None, scores[None])
        if 0 < (top_k := asked.get("top_k", 0)) < len(scores):
            wide = TopKLogitsWarper(top_k)(None, wide)
        if (top_p := asked.get("top_p", 1.0)) < 1.0:
            wide = TopPLogitsWarper(top_p)(None, wide)
        if (min_p := asked.get("min_p", 0.0)) > 0.0:
            wide = MinPLogitsWarper(min_p)(None, wide)
        if (typical := asked.get("typical_p", 1.0)) < 1.0:
            wide = TypicalLogitsWarper(typical)(None, wide)
        [left] = wide
        if "seed" not in asked.sampling:
            return Verdict(None, math.inf, left)
        noisy = left.double() + gumbel(asked.sampling["seed"], asked.choice, position, len(left))
        best = noisy.topk(2)
        return Verdict(int(best.indices[0]), float(best.values[0] - best.values[1]), left)

    # ---- the end

    def end(self, asked: Asked, output: list[int]) -> End | None:
        """Return where a choice that samples ``output`` ends, or None if it does not end there."""
        matcher = self.matcher(asked.constraint)
        for count, token in enumerate(output, start=1):
            is_complete = False
            if matcher is not None:
                matcher.consume_token(token)
                is_complete = matcher.is_stopped()
            found = self._end_at(asked, output[:count], is_complete=is_complete)
            if found is not None:
                return found
        return None

    def _end_at(self, asked: Asked, output: list[int], *, is_complete: bool) -> End | None:
        count, token = len(output), output[-1]
        is_armed = count > min(asked.get("min_tokens", 0), asked.max_tokens)
        before, text = self.text(asked, output[:-1]), self.text(asked, output)
        includes = asked.get("include_stop", False)
        is_end = (is_armed and token in asked.stop_ids) or (is_complete and token in self.ends)
        if is_end and not includes:
            text = before
        if is_armed and (hit := _first_stop(asked.get("stop", ()), whole(before), text)):
            end, stop = hit
            return End(count, "STOP", stop, text[: end if includes else end - len(stop)])
        if is_end:
            return End(count, "STOP", token, text)
        if is_complete:
            return End(count, "STOP", None, text)
        return End(count, "LENGTH", None, text) if count == asked.max_tokens else None

    def text(self, asked: Asked, output: list[int]) -> str:
        """Return the text of a choice that samples ``output``."""
        shown = self.decode(asked.prompt, skip=asked.skip_special)
        both = self.decode([*asked.prompt, *output], skip=asked.skip_special)
        assert both.startswith(shown)
        return both[len(shown) :]


def whole(text: str) -> str:
    """Return the text without an incomplete character at its end."""
    return text.rstrip("\ufffd")


def _first_stop(stops: tuple[str, ...], before: str, text: str) -> tuple[int, str] | None:
    """Return where a stop string first ends behind ``before``, and the longest one ending there."""
    hits = [
        (end, stop)
        for stop in stops
        for end in range(len(before) + 1, len(text) + 1)
        if text[:end].endswith(stop)
    ]
    return min(hits, key=lambda hit: (hit[0], -len(hit[1])), default=None)


# ---- noise -----------------------------------------------------------------------------------


def mix(value: int) -> int:
    """Return the finaliser of splitmix64."""
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def gumbel(seed: int, choice: int, position: int, vocab: int) -> torch.Tensor:
    """Return the Gumbel noise of every token at one position, [vocab] float64."""
    key = mix(seed + GOLDEN)
    for part in (choice, position):
        key = mix(key + (part + 1) * GOLDEN)
    bits = [mix(key + (token + 1) * GOLDEN) >> 12 for token in range(vocab)]
    uniforms = [(one + 0.5) * 2.0**-52 for one in bits]
    noise = [-math.log(-math.log1p(-one)) for one in uniforms]
    return torch.tensor(noise, dtype=torch.float64)
