"""`TextState` against naive oracles: decode everything again at every token, then search.

The oracles have no streams, held text or forks. Byte-level tokenizers are compared on any ids. With
byte fallback a later byte may change the decoding of earlier ones: there the oracle follows the
rule in the module of `TextState`.
"""

from itertools import chain, takewhile

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.core.common.types import EndReason
from engine.core.text.types import Stops
from engine.worker.tokenizing.detokenizer import IncrementalDecoder, StopMatcher, TextState
from engine.worker.tokenizing.tokenizer import HfTokenizer
from tests.support import toy_tokenizers

STOP = EndReason.STOP
BYTES = HfTokenizer(toy_tokenizers.byte_level())
QWEN = HfTokenizer(toy_tokenizers.qwen_like())
LLAMA = HfTokenizer(toy_tokenizers.llama_like())
TOKENIZERS = {"byte_level": BYTES, "llama_like": LLAMA, "qwen_like": QWEN}


def byte_ids(tokenizer, data):
    """Return the tokens that stand for single bytes, one for each byte."""
    if tokenizer is LLAMA:
        return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    from tokenizers import pre_tokenizers

    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    names = {}
    for code in [*range(0x80), *range(0x80, 0x800)]:  # UTF-8 of these has every byte below E0
        encoded = chr(code).encode()
        names |= dict(zip(encoded, split.pre_tokenize_str(chr(code))[0][0], strict=True))
    for start in ("\u0800", "\u1000", *(chr(c << 12) for c in range(2, 13)), "\ue000", "\uf000"):
        encoded = start.encode()
        names |= dict(zip(encoded, split.pre_tokenize_str(start)[0][0], strict=True))
    for start in ("\U00010000", "\U00040000", "\U00080000", "\U000c0000", "\U00100000"):
        encoded = start.encode()
        names |= dict(zip(encoded, split.pre_tokenize_str(start)[0][0], strict=True))
    return [tokenizer.backend.token_to_id(names[byte]) for byte in data]


def common_length(first, second):
    """Return how many characters two texts have in common at their start."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))])


def text_after(tokenizer, prompt, output, skip=True):
    """Return the oracle's text of an output: what it adds to the prompt's decoding."""
    before = tokenizer.decode([*prompt], skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    return whole[common_length(before, whole) :]


def run(tokenizer, prompt, output, skip=True):
    """Return all text that `TextState` shows of an output that ends by max_tokens."""
    state = TextState(tokenizer, Stops(max_tokens=len(output), skip_special=skip), prompt)
    steps = [state.push(token_id) for token_id in output]
    assert [s.finish for s in steps] == [None] * (len(output) - 1) + [EndReason.LENGTH]
    assert state.num_tokens == len(output)
    return "".join(step.text for step in steps)


# --- the text -------------------------------------------------------------------------------

HIGH_BYTES = [0x80, 0x8C, 0x9F, 0xB6, 0xBF, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xEF, 0xBD, 0xF0]
SOME_TEXTS = ["a", " there", "é", "🌶", "👩‍👩‍👧", "\ufffd", "漢字", "\n", "<|endoftext|>"]


def ids_strategy(tokenizer):
    """Draw any ids, with many single bytes, whole characters and ids beyond the vocabulary."""
    raw = byte_ids(tokenizer, HIGH_BYTES)
    one = st.one_of(
        st.sampled_from(raw),
        st.integers(0, tokenizer.vocab_size + 3),
        st.sampled_from(sorted(tokenizer.special_ids)),
    )
    spelled = st.sampled_from(SOME_TEXTS).map(lambda t: list(tokenizer.encode(t)))
    split = st.sampled_from(SOME_TEXTS).map(lambda t: byte_ids(tokenizer, t.encode()))
    part = st.one_of(st.lists(one, max_size=6), spelled, split)
    return st.lists(part, max_size=12).map(lambda parts: [*chain(*parts)])


@pytest.mark.parametrize("name", ["byte_level", "qwen_like"])
@pytest.mark.parametrize("skip", [True, False])
def test_joined_text_is_the_decoding_of_any_ids_after_any_prompt(name, skip):
    tokenizer = TOKENIZERS[name]
    raw = byte_ids(tokenizer, HIGH_BYTES)
    ids = ids_strategy(tokenizer)

    @settings(max_examples=40, deadline=None)
    @given(prompt=ids, output=ids.filter(bool))
    @example(prompt=[], output=raw * 8)
    @example(prompt=raw * 3 + byte_ids(tokenizer, b"\xf0"), output=raw[1:])
    def check(prompt, output):
        assert run(tokenizer, prompt, output, skip) == text_after(tokenizer, prompt, output, skip)

    check()


@settings(max_examples=100, deadline=None)
@given(data=st.lists(st.sampled_from(HIGH_BYTES), min_size=1, max_size=120))
def test_long_runs_of_invalid_bytes_decode_as_a_whole(data):
    """The run is longer than what the decoder holds; no replacement character is lost or added."""
    output = byte_ids(BYTES, data)
    assert run(BYTES, (), output) == bytes(data).decode("utf-8", "replace")


def fallback_oracle(tokens):
    """Apply byte fallback by the rule of `TextState`: a character stays once it is complete."""
    text, chunk = "", b""
    for token_id in tokens:
        name = LLAMA.backend.id_to_token(token_id)
        if name.startswith("<0x"):
            chunk += bytes([int(name[3:5], 16)])
            try:
                text, chunk = text + chunk.decode(), b""
            except UnicodeDecodeError:
                continue
        else:
            text, chunk = text + "\ufffd" * len(chunk) + name.replace("▁", " "), b""
    return text + "\ufffd" * len(chunk)


LLAMA_WORDS = [i for i in range(259, LLAMA.vocab_size) if LLAMA.token_text(i)]
LLAMA_PARTS = st.one_of(
    st.sampled_from(LLAMA_WORDS).map(lambda i: [i]),
    st.sampled_from(["a", "é", "🌶", "漢字"]).map(lambda t: byte_ids(LLAMA, t.encode())),
    # Left out: the three bytes of U+FFFD inside an invalid run, which may count as invalid bytes.
    st.lists(st.sampled_from(byte_ids(LLAMA, HIGH_BYTES)), max_size=7).filter(
        lambda ids: str(byte_ids(LLAMA, "\ufffd".encode()))[1:-1] not in str(ids)
    ),
)
LLAMA_IDS = st.lists(
    st.tuples(LLAMA_PARTS, st.sampled_from(LLAMA_WORDS)).map(lambda p: [*p[0], p[1]]), max_size=8
).map(lambda parts: [*chain(*parts)])


@settings(max_examples=100, deadline=None)
@given(
    prompt=st.sampled_from(["Once upon a time", "", " ", "é", "a🌶"]),
    begun=st.sampled_from([b"", b"\xf0", b"\xf0\x9f", b"\xe2\x82", b"\xc3"]),
    output=LLAMA_IDS.filter(bool),
)
def test_joined_text_with_byte_fallback(prompt, begun, output):
    before = [*LLAMA.encode(prompt, add_special_tokens=False), *byte_ids(LLAMA, begun)]
    text, whole = fallback_oracle(before), fallback_oracle([*before, *output])
    expected = whole[common_length(text, whole) :]
    if not before:  # the tokenizer adds a space before a text
        expected = expected.removeprefix(" ")
    assert run(LLAMA, [1, *before], output) == expected


def test_valid_output_with_byte_fallback_is_the_decoding():
    texts = ["naïve 🌶 漢字", "one two", "👩‍👩‍👧 a é"]
    for text in texts:
        prompt, output = LLAMA.encode("Once upon"), LLAMA.encode(text, add_special_tokens=False)
        assert run(LLAMA, prompt, output) == text_after(LLAMA, prompt, output) == " " + text


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_text_after_a_prompt_keeps_its_space(name):
    tokenizer = TOKENIZERS[name]
    whole = tokenizer.encode("Once upon a time there was")
    prompt = tokenizer.encode("Once upon a time")
    assert whole[: len(prompt)] == prompt
    assert run(tokenizer, prompt, whole[len(prompt) :]) == " there was"


def test_special_tokens_between_prompt_and_output_change_no_space():
    prompt = [*LLAMA.encode("Once upon"), *[2] * 100]
    output = LLAMA.encode("Once upon a time")[3:]
    assert run(LLAMA, prompt, output) == " a time"
    assert run(LLAMA, [1], LLAMA.encode("Once upon")[1:]) == "Once upon"
    assert run(LLAMA, [1], LLAMA.encode("Once upon")[1:], skip=False) == " Once upon"


def test_a_prompt_that_ends_inside_a_character_is_not_shown_again():
    """tokenizers' DecodeStream would return the prompt again (vllm-project/vllm issue 48853)."""
    prompt = [*BYTES.encode("Once upon "), *byte_ids(BYTES, "🌶".encode()[:2])]
    assert run(BYTES, prompt, byte_ids(BYTES, "🌶 b".encode()[2:])) == "🌶 b"
    assert run(BYTES, prompt, byte_ids(BYTES, b"ab")) == "ab"
    assert run(BYTES, prompt, byte_ids(BYTES, b"\xff"[:0] + b"\xc3")) == "\ufffd"


def test_a_later_byte_that_spoils_a_run_does_not_raise():
    """tokenizers' own DecodeStream would raise InvalidPrefix (vllm-project/vllm issue 17448)."""
    euro, word = byte_ids(LLAMA, "€".encode()), LLAMA.encode("Once")[1]
    assert (
        run(LLAMA, (1, word), [*euro, *byte_ids(LLAMA, b"\xff\xfe"), word]) == "€\ufffd\ufffd Once"
    )


def test_characters_appear_whole_and_at_once():
    state = TextState(BYTES, Stops(max_tokens=99), BYTES.encode("Once"))
    texts = [state.push(i).text for i in byte_ids(BYTES, "a🌶é".encode())]
    assert texts == ["a", "", "", "", "🌶", "", "é"]


def test_held_invalid_bytes_are_bounded():
    decoder = IncrementalDecoder(BYTES, (), hidden=BYTES.special_ids)
    held = longest = 0
    for token_id in byte_ids(BYTES, b"\xbf") * 1000:
        held += 1 - len(decoder.step(token_id))
        longest = max(longest, held)
    assert longest <= 16
    assert len(decoder.flush()) == held


# --- ends -----------------------------------------------------------------------------------


def oracle_steps(tokenizer, stops, prompt, output):
    """Return (all text so far, finish, matched) after each token, by decoding everything again."""
    searched = special_tokens_within(tokenizer, stops.strings)
    hidden = searched if stops.skip_special else {}
    whole = [s for s in stops.strings if any(text in s for text in searched.values())]
    plain = [s for s in stops.strings if s not in whole]
    arrived, steps = [], []
    for count, token_id in enumerate(output):
        armed = count >= stops.min_tokens
        is_stop_id = armed and token_id in stops.token_ids
        is_last = count + 1 == stops.max_tokens
        tokens = output[: count + (stops.include or not is_stop_id)]
        full = marked_text(tokenizer, prompt, tokens, stops, hidden)
        if is_stop_id and not stops.include:  # the token is searched, but not shown
            full = [*full, *((c, False) for c in searched.get(token_id, ""))]
        old = len(arrived)
        if is_stop_id or is_last or full[-1:] != [("\ufffd", True)]:
            arrived = full
        shown = [place for place, (_, is_shown) in enumerate(arrived) if is_shown]
        ends = occurrences(arrived, range(len(arrived)), whole)
        ends += occurrences(arrived, shown, plain)
        ends = [one for one in ends if one[0] > old]
        if armed and ends:
            end, _, stop, begin = min(ends)
            return [*steps, (visible(arrived[: end if stops.include else begin]), STOP, stop)]
        if is_stop_id:
            return [*steps, (visible(arrived), STOP, token_id)]
        if is_last:
            return [*steps, (visible(arrived), EndReason.LENGTH, None)]
        held = max(held_of(arrived, whole), held_of([arrived[i] for i in shown], plain))
        text = visible(arrived)
        steps.append((text[: len(text) - held], None, None))
    return steps


def special_tokens_within(tokenizer, strings):
    """Return the texts of the special tokens that occur in stop strings, by their ids."""
    added = tokenizer.backend.get_added_tokens_decoder()
    texts = {id_: token.content for id_, token in added.items() if token.special}
    return {id_: t for id_, t in texts.items() if any(t in s for s in strings)}


def marked_text(tokenizer, prompt, tokens, stops, hidden):
    """Return each character of the output, and whether it is shown. The text before and after a
    token of ``hidden`` is decoded separately."""
    parts, rest = [[]], []
    for token_id in tokens:
        parts[-1].append(token_id)
        if token_id in hidden:
            parts.append([])
    for number, part in enumerate(parts):
        before = () if number else prompt
        rest += [(c, True) for c in text_after(tokenizer, before, part, stops.skip_special)]
        if part and part[-1] in hidden:
            rest += [(c, False) for c in hidden[part[-1]]]
    return rest


def occurrences(marked, places, strings):
    """Return where each string occurs in the characters at these places: end, …, string, begin."""
    text = "".join(marked[place][0] for place in places)
    return [
        (places[at + len(s) - 1] + 1, -len(s), s, places[at])
        for s in strings
        for at in range(len(text))
        if text.startswith(s, at)
    ]


def held_of(marked, strings):
    """Return how many shown characters the longest suffix has that may begin one of the strings."""
    text = "".join(c for c, _ in marked)
    proper = {s[:i] for s in strings for i in range(1, len(s))}
    size = max((len(p) for p in proper if text.endswith(p)), default=0)
    return len(visible(marked[len(marked) - size :]))


def visible(marked):
    """Return the characters that are shown."""
    return "".join(c for c, is_shown in marked if is_shown)


def actual_steps(state, output):
    """Return (all text so far, finish, matched) after each token, by `TextState`."""
    shown, steps = "", []
    for token_id in output:
        step = state.push(token_id)
        shown += step.text
        steps.append((shown, step.finish, step.matched))
        if step.finish is not None:
            break
    return steps


END_TOKEN = BYTES.backend.token_to_id("<|endoftext|>")
FEW_IDS = [*byte_ids(BYTES, "abcé".encode()), *BYTES.encode(" a"), END_TOKEN]
END_TEXT = "<|endoftext|>"
letters = st.sampled_from([*"abcé a", END_TEXT])
stop_strings = st.lists(
    st.lists(letters, min_size=1, max_size=5).map("".join)
    | st.sampled_from("abc").map(lambda letter: letter + END_TEXT),
    max_size=4,
).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    output=st.lists(st.sampled_from(FEW_IDS), min_size=1, max_size=40),
    prompt=st.sampled_from([(), BYTES.encode("Once upon"), tuple(byte_ids(BYTES, b"a\xc3"))]),
    strings=stop_strings,
    token_ids=st.just(frozenset({END_TOKEN})) | st.frozensets(st.sampled_from(FEW_IDS), max_size=2),
    limits=st.tuples(st.integers(0, 12), st.integers(1, 45)),
    include=st.booleans(),
    skip=st.booleans(),
)
def test_stops_are_those_of_decoding_and_searching_everything(
    output, prompt, strings, token_ids, limits, include, skip
):
    stops = Stops(
        max_tokens=limits[1],
        min_tokens=limits[0],
        strings=strings,
        token_ids=token_ids,
        include=include,
        skip_special=skip,
    )
    expected = oracle_steps(BYTES, stops, prompt, output)
    assert actual_steps(TextState(BYTES, stops, prompt), output) == expected


@settings(max_examples=100, deadline=None)
@given(
    pieces=st.lists(st.text("aab", max_size=4), max_size=30),
    strings=st.lists(st.text("aab", min_size=1, max_size=7), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_the_matcher_finds_what_str_find_finds(pieces, strings, include):
    matcher, shown, text = StopMatcher(strings, include=include), "", "".join(pieces)
    ends = [
        (at + len(s), -len(s), s)
        for s in strings
        for at in range(len(text))
        if text[at:].startswith(s)
    ]
    for piece in pieces:
        out, matched = matcher.feed(piece)
        shown += out
        if matched is not None:
            end, _, stop = min(ends)
            assert (matched, shown) == (stop, text[: end if include else end - len(stop)])
            return
    assert not ends
    assert shown + matcher.flush() == text


def steps_of(text, stops, prompt=()):
    """Return the steps of a text whose bytes come one by one."""
    state = TextState(BYTES, stops, prompt)
    return actual_steps(state, byte_ids(BYTES, text.encode()))


def test_a_stop_string_over_several_tokens_is_cut_out_or_kept():
    stops = Stops(max_tokens=99, strings=("abc",))
    assert [s[0] for s in steps_of("xab", stops)] == ["x", "x", "x"]
    assert steps_of("xababcyy", stops)[-1] == ("xab", EndReason.STOP, "abc")
    stops = Stops(max_tokens=99, strings=("abc",), include=True)
    assert steps_of("xababcyy", stops)[-1] == ("xababc", EndReason.STOP, "abc")


def test_the_stop_that_ends_first_wins_and_of_those_the_longest():
    stops = Stops(max_tokens=99, strings=("bcd", "c", "abc", "abcd"))
    assert steps_of("xabcd", stops)[-1] == ("x", EndReason.STOP, "abc")
    state = TextState(BYTES, Stops(max_tokens=9, strings=("upon", "on")), ())
    assert state.push(BYTES.encode(" upon")[0]).matched == "upon"


def test_text_behind_a_stop_inside_one_token_is_dropped():
    stops = Stops(max_tokens=9, strings=("up",))
    step = TextState(BYTES, stops, BYTES.encode("Once")).push(BYTES.encode(" upon")[0])
    assert (step.text, step.finish, step.matched) == (" ", EndReason.STOP, "up")


def test_a_stop_at_max_tokens_is_a_stop_and_held_text_is_shown_at_length():
    stops = Stops(max_tokens=3, strings=("abc",))
    assert steps_of("abc", stops)[-1] == ("", EndReason.STOP, "abc")
    assert steps_of("xab", stops)[-1] == ("xab", EndReason.LENGTH, None)
    assert steps_of("a🌶", stops)[-1] == ("a\ufffd", EndReason.LENGTH, None)


def test_a_stop_token_shows_its_text_only_when_asked_and_not_special():
    b = byte_ids(BYTES, b"b")[0]
    for include, text in ((False, "xa"), (True, "xab")):
        stops = Stops(max_tokens=9, strings=("az",), token_ids=frozenset({b}), include=include)
        assert steps_of("xabc", stops)[-1] == (text, EndReason.STOP, b)
    for skip, text in ((True, "x"), (False, "x<|endoftext|>")):
        stops = Stops(
            max_tokens=9, token_ids=frozenset({END_TOKEN}), include=True, skip_special=skip
        )
        got = actual_steps(TextState(BYTES, stops, ()), [*byte_ids(BYTES, b"x"), END_TOKEN])
        assert got[-1] == (text, EndReason.STOP, END_TOKEN)


# A stop string, what the model writes, and the text that is shown without and with the stop string.
SPECIAL_STOPS = [
    (END_TEXT, ["ab", END_TOKEN], "ab", "ab"),
    ("b" + END_TEXT, ["ab", END_TOKEN], "a", "ab"),
    (END_TEXT + "\nx", ["ab", END_TOKEN, "\nx"], "ab", "ab\nx"),
    (END_TEXT * 2, ["a", END_TOKEN, END_TOKEN], "a", "a"),
    (END_TEXT, ["ab" + END_TEXT], "ab", "ab" + END_TEXT),  # the model writes the marker as letters
    ("ab", ["a", END_TOKEN, "b"], "", "ab"),  # special tokens outside stop strings are ignored
]


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(("stop", "written", "before", "whole"), SPECIAL_STOPS)
def test_a_stop_string_with_a_special_token_stops_at_the_token(
    stop, written, before, whole, include
):
    """vLLM#2123: special tokens are not part of the text, and still stop the answer."""
    ids = [
        id_
        for part in written
        for id_ in ([part] if part == END_TOKEN else byte_ids(BYTES, part.encode()))
    ]
    stops = Stops(max_tokens=99, strings=(stop,), include=include)
    steps = actual_steps(TextState(BYTES, stops, ()), [*ids, *byte_ids(BYTES, b"zz")])
    assert steps[-1] == (whole if include else before, STOP, stop)
    assert len(steps) == len(ids)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", [END_TEXT, "b" + END_TEXT])
def test_a_stop_string_that_ends_in_the_models_own_end_token_is_cut_out_whole(stop, include, skip):
    ends = frozenset({END_TOKEN})
    stops = Stops(
        max_tokens=99, strings=(stop,), token_ids=ends, include=include, skip_special=skip
    )
    ids = [*byte_ids(BYTES, b"ab"), END_TOKEN]
    shown = ("ab" if skip else "ab" + END_TEXT) if include else ("ab" + END_TEXT)[: -len(stop)]
    assert actual_steps(TextState(BYTES, stops, ()), ids)[-1] == (shown, STOP, stop)
    state = TextState(BYTES, stops, ())
    said = "".join(state.push(id_).text for id_ in ids[:-1])
    step = state.push_end(END_TOKEN)  # as when a grammar ends
    assert (said + step.text, step.matched) == (shown, stop)


def test_min_tokens_defers_stops_and_a_stop_that_ended_before_stays_unseen():
    stops = Stops(max_tokens=99, min_tokens=3, strings=("ab", "bcd"))
    assert steps_of("abcxx", stops)[-1] == ("abcxx", None, None)
    assert steps_of("abcd", stops)[-1] == ("a", EndReason.STOP, "bcd")
    assert steps_of("xxxab", stops)[-1] == ("xxx", EndReason.STOP, "ab")
    a = byte_ids(BYTES, b"a")[0]
    stops = Stops(max_tokens=99, min_tokens=2, token_ids=frozenset({a}))
    assert [s[1] for s in steps_of("aaa", stops)] == [None, None, EndReason.STOP]


def test_pushing_behind_the_end_is_a_programmers_error():
    state = TextState(BYTES, Stops(max_tokens=1), ())
    assert state.push(5).finish is EndReason.LENGTH
    with pytest.raises(AssertionError):
        state.push(5)


@settings(max_examples=100, deadline=None)
@given(
    before=st.lists(st.sampled_from(FEW_IDS), max_size=15),
    first=st.lists(st.sampled_from(FEW_IDS), max_size=15),
    second=st.lists(st.sampled_from(FEW_IDS), max_size=15),
    strings=stop_strings,
)
def test_a_fork_goes_on_as_if_it_had_been_alone(before, first, second, strings):
    stops = Stops(max_tokens=99, strings=strings)
    prompt = byte_ids(BYTES, b"a\xc3")
    state = TextState(BYTES, stops, prompt)
    start = actual_steps(state, before)
    if start and start[-1][1] is not None:
        return
    twin = state.fork()
    one, two = actual_steps(state, first), actual_steps(twin, second)
    shown = start[-1][0] if start else ""
    for own, after in ((one, first), (two, second)):
        alone = actual_steps(TextState(BYTES, stops, prompt), [*before, *after])
        assert [(shown + text, *rest) for text, *rest in own] == alone[len(before) :]


def test_a_step_costs_the_same_late_as_early():
    """A stop string almost matches again and again; the matcher must not keep more text for it."""
    stop = "ab" * 128
    matcher = StopMatcher([stop], include=False)
    for _ in range(5000):
        matcher.feed("ab" * 100 + "x")
        assert len(matcher._held) < len(stop)
