"""Compiles constraints with llguidance, and keeps each sequence's state in its constraint (D15).

Rule 1: a client's constraint is compiled in the sandbox first
(`engine.worker.sampling.constraint_sandbox`), because that may take too long, take too much memory
or crash; only if it succeeds is the constraint compiled here. Rule 2: constraints are compiled in
threads of the caller, during steps. A step only copies a compiled constraint, and takes no lock of
ours. Rule 3: a sequence's matcher changes in `Matching.push` alone. Filling a mask has no visible
effect, so a step that raised can be repeated.

A constraint is compiled once for all its sequences. llguidance's copies share the lexer's states,
under a lock of llguidance. That is why masks are filled one after another: its parallel fill takes
as long for 32 rows of one constraint (99 ms and 91 ms for `[a-z ]{1,1000}` over 128,000 tokens, two
cores), and half as long only where each row has another constraint. Masks are filled after the
forward has been launched: a CUDA device computes meanwhile. On a CPU the forward occupies the
cores, and another thread gained nothing (8 rows of a model of 135 M on two cores: 164 ms a step,
159 without).

An end-of-sequence token may follow exactly where the grammar may end. Where no other token may
follow, the output is complete, and the sequence ends without an end token.
"""

from __future__ import annotations

import json
import re
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.core.common.steps import RowFailure, RowPhase
from engine.core.common.vocabulary import first_outside
from engine.core.text.types import TOOLS_KIND
from engine.errors import EngineBug, FieldViolation, InvalidRequest, Unsupported
from engine.worker.sampling.constraint_sandbox import ConstraintSandbox
from engine.worker.sampling.json_schemas import exact_lark, exact_schema
from engine.worker.sampling.masks import Mask

if TYPE_CHECKING:
    from engine.core.common.types import SequenceId
    from engine.core.text.types import Constraint
    from engine.worker.tokenizing.tokenizer import HfTokenizer

# llguidance's limits. initial_lexer_fuel is a tenth of its default, with which
# `((a{100}){100}){100}` takes 200 MB and a second (here 6 MB and 0.1 s). Schemas with a thousand
# properties and patterns need less than these limits.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 100_000,
    "max_lexer_states": 64_000,  # a state takes 1-2 KB; a constraint's sequences share them
    "max_grammar_size": 100_000,
    "verbose_errors": False,  # verbose messages quote the output
}
# JSON may have whitespace between its parts, but at most 32 characters (a line break and an indent
# of 15 levels), because a model that begins a run of spaces may never end it.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"
# Kinds of constraints whose grammar this server writes itself. 10,000 choices compile in 0.15 s.
TRUSTED = frozenset({"json_object", "choice"})
OWN_LIMITS = {"initial_lexer_fuel": 2_000_000, "max_grammar_size": 1_000_000}
TRUSTED_BYTES_PER_CHAR = 200  # memory of a compiled choice, by characters of its text: measured
MIN_BYTES = 1 << 16
# Filling a mask takes 5 µs to 5 ms, or longer for a costly constraint. Beyond TOKEN_S_MAX seconds
# in the sandbox, the constraint is refused; beyond MASK_S_MAX in a step, the request ends.
TOKEN_S_MAX = 0.025
MASK_S_MAX = 0.25
REASON_CHARS = 300
PROBE = '{"key": [1, true], "é": "x\\n"}\n <b>'
LARK_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])*/')  # a string or a pattern
NO_FORCING = '%llguidance {"no_forcing": true}\n'  # a text may be spelled by any tokens

NOT_COMPILED = "is not compiled"
TOO_COMPLEX = "became too complex to follow"
LEAVES_NOTHING = (
    "and the request's other settings (allowed and banned tokens, bad words) leave no token "
    "together"
)


@dataclass(eq=False, slots=True)
class Matching:
    """The state of one sequence in its grammar (`engine.worker.sampling.guides.Guide`)."""

    _matcher: LLMatcher | None  # None if the constraint is not compiled; the row then fails
    ends: tuple[int, ...]
    _num_words: int
    _field: str
    _vocab: int
    shunned: ClassVar[frozenset[int]] = frozenset()
    num_reasoning: ClassVar[int] = 0

    def new_mask(self) -> Mask:
        """Return a mask for `fill` to write."""
        return Mask(self._num_words, self.ends, self._field)

    def fill(self, mask: Mask) -> None:
        """Set the bits of the tokens that may follow, or set ``trouble`` if that fails."""
        if self._matcher is None:
            mask.trouble = NOT_COMPILED
            return
        start = time.thread_time()
        try:
            words = mask.words
            self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        except Exception:
            mask.trouble = TOO_COMPLEX
            return
        if self._matcher.is_error() or time.thread_time() - start > MASK_S_MAX:
            mask.trouble = TOO_COMPLEX

    def allows(self, token: int) -> bool:
        """Return whether a token that another server or model sampled may follow. If the constraint
        is not compiled, the result is True, because the row fails by its mask anyway."""
        return self._matcher is None or self._matcher.validate_tokens([token]) == 1

    def forced(self) -> list[int]:
        """Return the tokens of the text that must follow, as the tokenizer writes it, up to a token
        that the model lacks. Other tokens of the same text may still be sampled. The list is empty
        if more than one text may follow."""
        if self._matcher is None:
            return []
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: first_outside(tokens, self._vocab)]

    def num_allowed(self, tokens: list[int]) -> int:
        """Return how many of these tokens may follow the output, from the first one on."""
        return 0 if self._matcher is None else max(0, self._matcher.validate_tokens(tokens))

    def push(self, token: int) -> bool:
        """Append a token to the output. Returns True if the output is complete.

        Raises:
            EngineBug: The grammar does not allow the token here.
        """
        if self._matcher is None or not self._matcher.consume_token(token):
            raise EngineBug(f"token {token} does not follow the constraint")
        return self._matcher.is_stopped()

    def fork(self) -> Matching:
        """Return an independent copy."""
        twin = None if self._matcher is None else self._matcher.deep_copy()
        return Matching(twin, self.ends, self._num_words, self._field, self._vocab)


class ConstraintCompiler:
    """Compiles constraints for one model and keeps them compiled. `compile` may be called from
    several threads at once, `start` only from the thread of a step."""

    def __init__(self, tokenizer: HfTokenizer, vocab: int, ends: frozenset[int]) -> None:
        self.tokenizer = tokenizer
        self.vocab = vocab
        self._wanted_ends = sorted(ends)
        self._compiled: dict[Constraint, LLMatcher] = {}
        self._tokenizer: LLTokenizer | None = None
        self._sandbox: ConstraintSandbox | None = None
        self._refusal = ""
        self._preparing = threading.Lock()  # never held by a step

    def compile(self, constraint: Constraint) -> int:
        """Compile a constraint for `start`; return an estimate of its bytes. This takes at most
        twice `constraint_sandbox.SECONDS_MAX` of processor time.

        Raises:
            InvalidRequest: It does not compile, or allows no text; the violation names its field.
            Unsupported: llguidance cannot use this model's tokenizer.
            Overloaded, ShuttingDown: The sandbox did not answer in time, or was closed.
        """
        tokenizer, sandbox = self._prepare(constraint.field_path)
        grammar = behind_lead(grammar_of(constraint), self._lead_of(constraint))
        size = max(MIN_BYTES, TRUSTED_BYTES_PER_CHAR * len(constraint.source))
        if constraint.kind not in TRUSTED:
            attempt = sandbox.try_grammar(grammar)
            if attempt.error:
                raise InvalidRequest.of(constraint.field, _reason(attempt.error))
            if attempt.token_s > TOKEN_S_MAX:
                raise InvalidRequest.of(
                    constraint.field, "takes too long to follow, token by token"
                )
            size = max(MIN_BYTES, attempt.num_bytes)
        matcher = _build(tokenizer, grammar, constraint)
        first = Mask(_num_words(tokenizer), ())
        matcher.unsafe_compute_mask_ptr(first.words.ctypes.data, first.words.nbytes)
        if matcher.is_error():
            raise InvalidRequest.of(constraint.field, _reason(matcher.get_error()))
        if not first.words.any():
            raise InvalidRequest.of(constraint.field, "allows no text at all")
        self._compiled[constraint] = matcher
        return size

    def start(self, constraint: Constraint) -> Matching:
        """Return a constraint's state before the first token. If the constraint is not compiled,
        only the row that uses it fails, not the step."""
        matcher, tokenizer = self._compiled.get(constraint), self._tokenizer
        if matcher is None or tokenizer is None:
            return Matching(None, (), 0, constraint.field_path, self.vocab)
        ends, num_words = tuple(tokenizer.eos_tokens), _num_words(tokenizer)
        return Matching(matcher.deep_copy(), ends, num_words, constraint.field_path, self.vocab)

    def forget(self, constraint: Constraint) -> None:
        """Drop a compiled constraint that no sequence will start with."""
        self._compiled.pop(constraint, None)

    def close(self) -> None:
        """Drop all constraints and end the sandbox; a `compile` under way raises. Idempotent."""
        self._compiled.clear()
        if self._sandbox is not None:
            self._sandbox.close()

    def _lead_of(self, constraint: Constraint) -> str:
        """Return the constraint's lead. With a marker's text in the form it begins with
        `NO_FORCING`: llguidance would mask all but that token, as the tokenizer writes the text,
        and then refuse it. A token that a Lark grammar names without quotes is none of its texts.
        """
        plain = constraint.source
        if constraint.kind == "lark":
            plain = "".join(LARK_TEXT.findall(plain))
        if constraint.kind == "json_schema":
            plain = json.dumps(json.loads(plain), ensure_ascii=False)
        if not self.tokenizer.has_marker(plain.replace("\\", "")):
            return constraint.lead
        return NO_FORCING + (constraint.lead or "start: @form\n")

    def _prepare(self, field: str) -> tuple[LLTokenizer, ConstraintSandbox]:
        """Return llguidance's own tokenizer and the sandbox. The first call makes them, which takes
        0.6 s for a vocabulary of 128,000 tokens. A refusal names ``field``."""
        with self._preparing:
            if not self._refusal and (self._tokenizer is None or self._sandbox is None):
                self._build_tokenizer()
            if self._refusal:
                raise Unsupported(self._refusal, field=field)
            assert self._tokenizer is not None
            assert self._sandbox is not None
            return self._tokenizer, self._sandbox

    def _build_tokenizer(self) -> None:
        backend = self.tokenizer.backend
        text = backend.to_str()
        vocab = max(self.vocab, 1 + max(backend.get_vocab(with_added_tokens=True).values()))
        ends = self._wanted_ends or None
        try:
            built = LLTokenizer(text, n_vocab=vocab, eos_token=ends)
            ids = list(self.tokenizer.encode(PROBE, add_special_tokens=False))
            is_same = built.decode_bytes(ids).removeprefix(b" ") == PROBE.encode()
            why = "" if is_same else "llguidance reads its tokens as another text"
        except BaseException as error:
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            why = _reason(str(error))
        if why:
            self._refusal = f"this model's tokenizer cannot be used with a constraint: {why}"
            return
        self._tokenizer = built
        self._sandbox = ConstraintSandbox(text, vocab, ends, LIMITS)


def refusal(sequence: SequenceId, mask: Mask, why: str) -> RowFailure:
    """Return the failure of a row whose constraint cannot be followed further."""
    return RowFailure(sequence, RowPhase.SAMPLE, why, FieldViolation(mask.field, why))


def grammar_of(constraint: Constraint) -> str:
    """Return the constraint in llguidance's own notation.

    Raises:
        InvalidRequest: The schema is not JSON, or has a part that llguidance would not follow
            exactly, or the text is not Unicode.
    """
    try:
        return _grammar_of(constraint.kind, constraint.source)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest.of(constraint.field, _reason(str(error))) from None


def _grammar_of(kind: str, source: str) -> str:
    if kind in ("json_object", "json_schema"):
        schema = '{"type": "object"}' if kind == "json_object" else source
        exact = exact_schema(schema, whitespace_pattern=WHITESPACE)
        return LLMatcher.grammar_from_json_schema(exact)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind in ("lark", TOOLS_KIND):
        return LLMatcher.grammar_from_lark(exact_lark(source))
    texts = [json.dumps(text, ensure_ascii=False) for text in source.split("\0")]
    return LLMatcher.grammar_from_lark("start: TEXT\nTEXT: " + " | ".join(texts))


def behind_lead(grammar: str, lead: str) -> str:
    """Return the grammar of an output that has the Lark grammar ``lead``, with ``grammar`` as
    ``@form`` in it; without a lead, the grammar."""
    if not lead:
        return grammar
    form = json.loads(grammar) if grammar.startswith("{") else {}
    [part] = form.get("grammars") or [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": lead}, part | {"name": "form"}]})


def _build(tokenizer: LLTokenizer, grammar: str, constraint: Constraint) -> LLMatcher:
    limits = LIMITS | (OWN_LIMITS if constraint.kind in TRUSTED else {})
    try:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits))
    except Exception as error:
        raise InvalidRequest.of(constraint.field, _reason(str(error))) from error
    if matcher.is_error():
        raise InvalidRequest.of(constraint.field, _reason(matcher.get_error()))
    return matcher


def _num_words(tokenizer: LLTokenizer) -> int:
    return (tokenizer.vocab_size + 31) // 32


def _reason(error: str) -> str:
    """Return the sentence of llguidance's message, without its state dump, for a client."""
    if error.startswith("panic"):
        return "llguidance cannot compile it"
    lines = error.splitlines() or [""]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    reason = " ".join((errors or lines)[0].split())
    return reason if len(reason) <= REASON_CHARS else reason[: REASON_CHARS - 1] + "…"
