"""A token that the embedding has no row for is refused by name, wherever it comes from.

Here the tokenizer of each kind of model has such a token: text models (compiled and stock), a
vision model, an encoder, cross-encoders and image models. The model's next request works.
"""

import json
from contextlib import closing

import pytest
import trio
from safetensors.torch import load_file, save_file

from engine.api.engine import open_engine
from engine.config import EngineConfig, ModelConfig
from engine.core.text.types import Constraint
from engine.errors import InvalidRequest, SpawnFailed
from engine.requests.encode.values import EmbedRequest, RerankRequest
from engine.requests.image_generation.values import DrawRequest
from engine.requests.text.chat_values import Chat
from engine.requests.text.continuation import Continuation, ContinuedChoice
from engine.requests.text.values import GenerateRequest
from engine.worker.factory import make_runner
from engine.worker.sampling.constraint_compiler import ConstraintCompiler
from engine.worker.tokenizing.tokenizer import load_tokenizer
from tests.checkpoints import encode as encoder
from tests.checkpoints import image_generation as diffusion
from tests.checkpoints import text, vision
from tests.support import encoder_zoo
from tests.support.added_tokens import add_token, rows_of
from tests.support.images import picture

OWN = "<own>"  # the token without a row
TEMPLATE = (
    "{% for m in messages %}{{ '" + OWN + "' if m.role == 'tool' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}"
)
TEXT_MODELS = ("llama", "gpt2")  # compiled, and stock
SHORT = {"max_tokens": 2}
HELLO = {"role": "user", "content": "a"}
SEEN = [{"type": "image", "image": picture(40, 40)}, {"type": "text", "text": OWN}]


def generates(**fields):
    return lambda own: GenerateRequest(sampling=SHORT, **fields)


def samples(**fields):
    return lambda own: GenerateRequest(
        text="a", sampling=SHORT | {key: make(own) for key, make in fields.items()}
    )


TEXTS = {  # a request made from the token's id, and the field that its refusal names
    "a text": (generates(text=f"a {OWN} b"), "text"),
    "a text, cut": (generates(text=f"a {OWN} b", prompt={"truncate_to": 3}), "text"),
    "a chat": (generates(chat=Chat([{"role": "user", "content": f"a {OWN} b"}])), "chat"),
    "a chat that may be cut": (
        generates(chat=Chat([{"role": "user", "content": OWN}], truncates=True)), "chat",
    ),
    "a template": (generates(chat=Chat([{"role": "tool", "content": "x"}])), "chat"),
    "an answer begun": (
        generates(
            chat=Chat(
                [HELLO, {"role": "assistant", "content": f"b {OWN}"}],
                continue_final_message=True,
                add_generation_prompt=False,
            )
        ),
        "chat",
    ),
    "ids": (
        lambda own: GenerateRequest(token_ids=(1, 2, own), sampling=SHORT), "token_ids.ids[2]",
    ),
    "a continuation": (
        lambda own: GenerateRequest(
            text="a", sampling=SHORT, continuation=Continuation((ContinuedChoice((own,)),))
        ),
        "continuation.choices[0].token_ids[0]",
    ),
    "stop ids": (samples(stop_token_ids=lambda own: (own,)), "sampling.stop_token_ids[0]"),
    "allowed ids": (samples(allowed_token_ids=lambda own: (own,)), "sampling.allowed_token_ids[0]"),
    "banned ids": (samples(banned_token_ids=lambda own: (own,)), "sampling.banned_token_ids[0]"),
    "a bias": (samples(logit_bias=lambda own: {own: 1.0}), "sampling.logit_bias[{own}]"),
}  # fmt: skip
CASES = {
    **{(arch, name): case for arch in TEXT_MODELS for name, case in TEXTS.items()},
    **{("smolvlm", name): TEXTS[name] for name in ("a text", "a chat", "a continuation")},
    ("smolvlm", "an image"): (
        generates(chat=Chat([{"role": "user", "content": SEEN}])), "chat",
    ),
    ("embedder", "a text"): (lambda own: EmbedRequest(inputs=["a", f"b {OWN}"]), "inputs[1].text"),
    ("embedder", "ids"): (
        lambda own: EmbedRequest(inputs=["a", (1, own)]), "inputs[1].token_ids.ids[1]",
    ),
    **{
        (name, place): (case, field)
        for name in ("reranker", "pairs")
        for place, case, field in (
            ("a document", lambda own: RerankRequest(query="a", documents=["b", OWN]),
             "documents[1]"),
            ("a query", lambda own: RerankRequest(query=f"a {OWN}", documents=["b", "c"]), "query"),
        )
    },
    **{
        (name, field): (lambda own, field=field: DrawRequest(**{"prompt": "a", field: OWN}), field)
        for name in ("sd", "sdxl", "second")
        for field in ("prompt", "negative_prompt")
    },
}  # fmt: skip


def rows_of_drawing(folder):
    return json.loads((folder / "text_encoder" / "config.json").read_text())["vocab_size"]


def write_texts(root):
    """Yield text models whose template writes the token for the turn of a tool."""
    for name in (*TEXT_MODELS, "smolvlm"):
        if name == "smolvlm":
            out = vision.make(root / name, name)
        else:
            out = text.make(root / name, name, text.PRESETS["tiny"])
        path = out / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
        (out / "chat_template.jinja").unlink(missing_ok=True)
        yield name, out, add_token(out, OWN, rows_of(out))


def write_encoders(root):
    """Yield an embedding model, a classifier of pairs, and a reranker that generates."""
    kind = next(one for one in encoder_zoo.GENERATORS.values() if one.template)
    for name, out in (
        ("embedder", encoder.make_embedder(root / "embedder")),
        ("reranker", encoder.make_reranker(root / "reranker")),
        ("pairs", encoder_zoo.write_generator(root / "pairs", kind)),
    ):
        yield name, out, add_token(out, OWN, rows_of(out))


def write_drawers(root):
    """Yield image models with the token in the tokenizer of each text encoder; in "second" only in
    the second encoder's tokenizer."""
    for name, arch in (("sd", "sd"), ("sdxl", "sdxl"), ("second", "sdxl")):
        out = diffusion.make(root / name, arch)
        rows = rows_of_drawing(out)
        for folder in {"sd": ("tokenizer",), "second": ("tokenizer_2",)}.get(
            name, ("tokenizer", "tokenizer_2")
        ):
            add_token(out / folder, OWN, rows)
        yield name, out, rows


WRITERS = {
    name: write
    for write, names in (
        (write_texts, (*TEXT_MODELS, "smolvlm")),
        (write_encoders, ("embedder", "reranker", "pairs")),
        (write_drawers, ("sd", "sdxl", "second")),
    )
    for name in names
}


async def ask(eng, model, request):
    """Return the events of a request, all of them."""
    call = {
        GenerateRequest: eng.generate,
        EmbedRequest: eng.embed,
        RerankRequest: eng.rerank,
        DrawRequest: eng.draw,
    }[type(request)]
    object.__setattr__(request, "model", model)
    async with call(request) as stream:
        return [event async for event in stream]


GOOD = {
    GenerateRequest: lambda: GenerateRequest(text="a b", sampling=SHORT),
    EmbedRequest: lambda: EmbedRequest(inputs=["a", "b"]),
    RerankRequest: lambda: RerankRequest(query="a", documents=["b"]),
    DrawRequest: lambda: DrawRequest(prompt="a", width=64, height=64, steps=1),
}


class Said:
    """The answer to each case: the violations of a refusal, or the events. After each case a valid
    request is answered. Models of one kind are loaded together when the first is needed."""

    def __init__(self, root):
        self.root, self.told, self.own, self.back = root, {}, {}, {}

    def of(self, model, name):
        """Return the answer to a case, and the id of its model's token without a row."""
        if model not in self.own:
            self.ask_all(WRITERS[model])
        return self.told[model, name], self.own[model]

    def ask_all(self, write):
        """Ask every case of a kind's models."""
        made = list(write(self.root))
        self.own |= {name: own for name, _, own in made}
        config = EngineConfig(
            models=tuple(ModelConfig(str(out), name, threads=1) for name, out, _ in made),
            check_level=2,
            kv_cache_memory=16 << 20,
            spawn_timeout_s=250.0,
        )

        async def main():
            async with open_engine(config) as eng:
                for (model, name), (make, _) in CASES.items():
                    if WRITERS[model] is not write:
                        continue
                    request = make(self.own[model])
                    try:
                        with trio.fail_after(60):
                            self.told[model, name] = await ask(eng, model, request)
                    except Exception as error:
                        self.told[model, name] = error
                    assert await ask(eng, model, GOOD[type(request)]())
                for name, _, own in made if write is not write_drawers else ():
                    spans, _ = await eng.tokenize(name, text=f"a {OWN}")
                    ids = [span.token_id for span in spans]
                    assert own in ids
                    self.back[name] = await eng.detokenize(name, ids, skip_special_tokens=False)
                    for wrong in (own + 1, 2**40, -1):
                        with pytest.raises(InvalidRequest, match=rf"ids\[2\]: is {wrong}, outside"):
                            await eng.detokenize(name, [own, 0, wrong])

        trio.run(main)


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    return Said(tmp_path_factory.mktemp("own"))


@pytest.mark.parametrize(("model", "name"), CASES)
def test_a_token_without_a_row_is_refused_by_name(said, model, name):
    error, own = said.of(model, name)
    assert isinstance(error, InvalidRequest), error
    [violation] = error.violations
    assert violation.field == CASES[model, name][1].format(own=own)
    assert f"outside the vocabulary of {own}" in violation.description
    is_text = not violation.field.endswith("]") or "documents" in violation.field
    assert not is_text or f"the token '{OWN}' with the id {own}" in violation.description


@pytest.mark.parametrize("model", ["llama", "embedder"])
def test_the_tokens_of_a_text_are_text_again_with_or_without_a_row(said, model):
    """Detokenize needs no embedding, so it takes every id that Tokenize returns."""
    said.of(model, "ids")
    assert all(OWN in text for text in said.back.values())


# ---- tokens that no field of a request contains


def test_a_form_forces_no_token_without_a_row(said):
    """Red if such a token is forced: forced tokens are drafted, and the model would read it."""
    [(_, folder, own)] = [one for one in write_texts(said.root / "forms") if one[0] == "llama"]
    tokenizer = load_tokenizer(folder)
    with closing(ConstraintCompiler(tokenizer, own, frozenset({0}))) as compiler:
        for kind, source in (("lark", f"start: {OWN}"), ("lark", f'start: "abc" {OWN} "d"')):
            constraint = Constraint(kind, source)
            compiler.compile(constraint)
            matching = compiler.start(constraint)
            forced = matching.forced()
            assert all(one < own for one in forced)
            assert bool(forced) == ("abc" in source)


def test_a_padding_token_without_a_row_is_refused_at_the_load(tmp_path):
    out = encoder.make_embedder(tmp_path)
    own = add_token(out, OWN, rows_of(out))
    path = out / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token": OWN}))
    model = ModelConfig(str(out), "m", threads=1)
    runner = make_runner(model, EngineConfig(models=(model,)))
    with pytest.raises(SpawnFailed, match=f"padding token has the id {own}, outside"):
        runner.load(lambda progress: None)


def test_token_types_without_a_row_are_refused_at_the_load(tmp_path):
    out = encoder.make_reranker(tmp_path)
    path, weights = out / "config.json", out / "model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"type_vocab_size": 1}))
    tensors = load_file(weights)
    [name] = [one for one in tensors if one.endswith("token_type_embeddings.weight")]
    tensors[name] = tensors[name][:1].clone()
    save_file(tensors, weights, {"format": "pt"})
    model = ModelConfig(str(out), "m", threads=1)
    runner = make_runner(model, EngineConfig(models=(model,)))
    with pytest.raises(SpawnFailed, match="a pair's tokens the type 1, and the model has 1"):
        runner.load(lambda progress: None)
