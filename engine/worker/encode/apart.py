"""Tokenises the texts of models that read a query and a document apart from each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.core.encode.types import TokenizedInput
from engine.errors import InvalidRequest
from engine.worker.load.refusal import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from engine.core.encode.types import EncodeInput
    from engine.worker.encode.tokenizer import InputTokenizer

QUERY = "query"  # the prompt of queries
# Names of the prompt of documents; the first that a model has counts, as in the library.
DOCUMENTS = ("document", "passage", "corpus")


def document_prompt(prompts: Mapping[str, str]) -> str:
    """Return the name of the prompt of documents; "" if a model has none."""
    return next((name for name in DOCUMENTS if name in prompts), "")


class ApartTokenizer:
    """An `engine.worker.encode.interface.EncoderTokenizer` of a model of sparse vectors, where a
    text of Embed is what its prompt says. ``prompts`` are the model's own by name.
    """

    def __init__(self, tokenizer: InputTokenizer, prompts: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        self._query = QUERY if QUERY in prompts else ""
        self._document = document_prompt(prompts)

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return one input for each text (`EncoderTokenizer.encode_texts`)."""
        return self._tokenizer.encode_texts(texts, prompt_name)

    def encode_pairs(self, query: str, documents: Sequence[str]) -> list[TokenizedInput]:
        """Return one input for each document, which has the query beside it, each after its own
        prompt and cut alone (`EncoderTokenizer.encode_pairs`)."""
        try:
            [one] = self.encode_texts([query], self._query)
        except InvalidRequest as error:
            raise error.renamed(lambda _: QUERY) from error
        return [
            TokenizedInput(made.input._replace(query=one.input), made.full_tokens, one.full_tokens)
            for made in self.encode_texts(documents, self._document)
        ]


@dataclass(frozen=True, slots=True)
class Expansion:
    """How a model lengthens queries: to ``length`` tokens, by the token ``token_id``, to which the
    other tokens attend if ``attends``."""

    length: int
    token_id: int
    attends: bool

    def expanded(self, given: EncodeInput) -> EncodeInput:
        """Return a query that is as long, if it was shorter."""
        missing = max(0, self.length - len(given.token_ids))
        types = given.type_ids and (*given.type_ids, *(0,) * missing)
        ids = (*given.token_ids, *(self.token_id,) * missing)
        return given._replace(token_ids=ids, type_ids=types, expanded=missing)


def query_limit(transformer: Any) -> int | None:
    """Return the most tokens of a query by the model's own setting; None: as of other texts."""
    given = transformer.query_expansion
    if given is not None and given["strategy"] == "fixed":
        return int(given["length"])
    limit: int | None = transformer.query_length
    return limit


def expansion_of(transformer: Any, most: int) -> Expansion | None:
    """Return how a model lengthens queries, which may have ``most`` tokens; None: it does not.

    Raises:
        Refusal: It does so in a way that is not served.
    """
    given, tokenizer = transformer.query_expansion, transformer.tokenizer
    if given is None:
        return None
    if tokenizer.padding_side == "left":
        raise Refusal("it expands queries, and its tokenizer pads on the left")
    if given["length"] > most:
        raise Refusal(f"it expands queries to {given['length']} tokens, of at most {most}")
    token = given["token"] or tokenizer.mask_token or tokenizer.eos_token
    return Expansion(given["length"], tokenizer.convert_tokens_to_ids(token), given["attend"])


class RolesTokenizer(ApartTokenizer):
    """An `ApartTokenizer` of a model of several vectors: a text of Embed after the prompt of
    queries is a query, and any other a document. ``queries`` has the limit of queries."""

    def __init__(
        self,
        documents: InputTokenizer,
        queries: InputTokenizer,
        prompts: Mapping[str, str],
        expansion: Expansion | None,
    ) -> None:
        super().__init__(documents, prompts)
        self._query = QUERY
        self._queries = queries
        self._expansion = expansion

    def encode_texts(self, texts: Sequence[str], prompt_name: str) -> list[TokenizedInput]:
        """Return one input for each text (`EncoderTokenizer.encode_texts`)."""
        if prompt_name != QUERY:
            return super().encode_texts(texts, prompt_name)
        made = self._queries.encode_texts(texts, prompt_name)
        return [one._replace(input=self._as_query(one.input)) for one in made]

    def _as_query(self, given: EncodeInput) -> EncodeInput:
        own = given if self._expansion is None else self._expansion.expanded(given)
        return own._replace(is_query=True)
