"""Runs an encoder: one model of sentence-transformers (D3, D14).

Rule 1: sentence-transformers interprets the model's files, and its modules compute. This file only
groups and pads inputs and finishes results. Rule 2: the library is imported when an encoder is
loaded, not before.
Rule 3: except for rounding, an input's values do not depend on its batch: padding is masked, and it
is on the right, or all texts have one length, or it is on the left because the score is read at the
last place.

The library loads the model in float32, whatever dtype the model computes in. While it loads in
another dtype, that dtype is torch's default in every thread, also in those that run text models.
"""

from __future__ import annotations

from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.core.common.steps import RowFailure, RowPhase, StepTimings
from engine.core.common.types import PlanId, SequenceId
from engine.core.encode.types import (
    EncodeInput,
    EncodeOptions,
    EncodePlan,
    EncodeResult,
    EncodeRow,
    EncodeRowResult,
    ImageInput,
    InputKind,
)
from engine.errors import EngineBug
from engine.images.decode import BYTES_PER_PIXEL
from engine.status import Capability
from engine.worker.encode.apart import (
    ApartTokenizer,
    RolesTokenizer,
    document_prompt,
    expansion_of,
    query_limit,
)
from engine.worker.encode.classifier import AUTO_CLASSES
from engine.worker.encode.files import check, check_projection
from engine.worker.encode.interface import EncoderInfo
from engine.worker.encode.library import (
    check_model_type,
    check_weights,
    input_template,
    is_causal,
    load_model,
    max_tokens_of,
    padding_of,
)
from engine.worker.encode.outputs import OUTPUTS
from engine.worker.encode.precision import read_ranges
from engine.worker.encode.tokenizer import InputTokenizer, Spans
from engine.worker.image_reader import ImageReader, text_width
from engine.worker.interface import Inspection, LoadProgress
from engine.worker.load.checkpoint import Checkpoint
from engine.worker.load.devices import pick_device, pick_dtype
from engine.worker.load.refusal import Refusal
from engine.worker.load.resolve import read_json, resolve
from engine.worker.tokenizing.tokenizer import HfTokenizer, tokenizer_bytes
from engine.worker.torch_runner import InProcessRunner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from engine.core.encode.types import AnyInput
    from engine.worker.encode.apart import Expansion
    from engine.worker.encode.interface import EncoderTokenizer
    from engine.worker.encode.outputs import Output
    from engine.worker.interface import RunnerSpec

# The most padding in a group, in tokens. A guess: one more forward costs as much as 48 tokens.
GROUP_COST_TOKENS = 48
# Capabilities of models that read a pair of texts together.
READ_WHOLE = (Capability.RERANK, Capability.TEXT_CLASSIFICATION)
# An estimate of a step's activations, in numbers per token and unit of the model's width: of the
# widest layer's input and output, of the attention (four), and of the residual.
ACTIVATIONS_PER_WIDTH = 16
# Copies of a forward's weights of the vocabulary that exist at once: the head's, the pooling's, and
# one while that is made.
WORD_COPIES = 3


class EncoderRunner(InProcessRunner[EncodePlan, EncodeResult, EncoderInfo]):
    """An `engine.worker.encode.interface.EncodeRunner` for models of sentence-transformers."""

    def __init__(self, spec: RunnerSpec, capability: Capability) -> None:
        super().__init__(spec)
        self._capability = capability
        self._model: Any = None  # a SentenceTransformer, a CrossEncoder or a Classifier.
        self._output: Output | None = None
        self._splits_prompts = False  # Whether the pooling excludes the prompt's tokens.
        self._has_types = False
        self._pad_id = 0
        self._pads_left = False
        self._modality = "text"  # The library's name of the inputs' kind: text or message.
        self._is_causal = False  # Whether the scores are logits of the next token.
        self._images: ImageReader | None = None
        self._reads_pairs = False  # Whether a chat template writes pairs of texts.
        self._expansion: Expansion | None = None
        self._limits: dict[str, int] = {}  # The tokens of a text by its role, for `EncoderInfo`.
        self._input_tokenizer: EncoderTokenizer | None = None

    @property
    def encoder_tokenizer(self) -> EncoderTokenizer:
        """The tokenizer of the model's inputs."""
        if self._input_tokenizer is None:
            raise EngineBug("the tokenizer was asked for before the encoder was loaded")
        return self._input_tokenizer

    def _inspect(self) -> Inspection:
        spec = self._spec
        device = pick_device(spec.device)
        directory = resolve(spec.model, spec.revision).directory
        folder = check(directory, self._capability)
        with Checkpoint(folder) as checkpoint:
            dtype = pick_dtype(spec.dtype, checkpoint.main_dtype, device)
            num_bytes = checkpoint.num_values * dtype.itemsize
            stored, file_bytes = checkpoint.stored, checkpoint.file_bytes
        config = read_json(folder, "config.json")
        length = int(config.get("max_position_embeddings") or 0)
        texts = config.get("text_config") or config
        names = config.get("architectures") or [config.get("model_type")]
        return Inspection(
            device=str(device),
            architecture=str(names[0]),
            dtype=str(dtype).removeprefix("torch."),
            stored=stored,
            file_bytes=file_bytes,
            weight_bytes=num_bytes,
            tokenizer_bytes=_tokenizer_bytes(texts.get("vocab_size"), device),
            workspace_bytes=self._workspace(config, length, dtype) + self._decoding_bytes(device),
            execution="sentence-transformers' modules",
        )

    def _decoding_bytes(self, device: torch.device) -> int:
        """Return the memory of ``device`` that decoding one image takes, in bytes."""
        reads_images = self._capability is Capability.IMAGE_EMBEDDING and device.type == "cpu"
        return BYTES_PER_PIXEL * self._spec.max_image_pixels if reads_images else 0

    def _workspace(self, config: dict[str, Any], max_tokens: int, dtype: torch.dtype) -> int:
        """Return the bytes of the activations of the largest step."""
        parts = (config, config.get("text_config") or {}, config.get("vision_config") or {})
        width = max(int(part.get("hidden_size") or 0) for part in parts)
        numbers = max(self._spec.max_num_batched_tokens, max_tokens) * width * ACTIVATIONS_PER_WIDTH
        if (at_once := OUTPUTS[self._capability].tokens_at_once) is not None:
            numbers += max(at_once, max_tokens) * int(config.get("vocab_size") or 0) * WORD_COPIES
        return numbers * dtype.itemsize

    def close(self) -> None:
        """Free the model's memory. Idempotent."""
        for module in [] if self._model is None else self._model.modules():
            for tensor in (*module.parameters(False), *module.buffers(False)):
                tensor.data = tensor.new_empty(0)  # at once: the modules are in reference cycles
        self._model = self._input_tokenizer = self._images = self._output = None
        super().close()

    # ---- loading

    def _load(self, progress: Callable[[LoadProgress], None]) -> EncoderInfo:
        progress(LoadProgress("config"))
        spec = self._spec
        self._device = device = pick_device(spec.device)
        source = resolve(spec.model, spec.revision)
        folder = check(source.directory, self._capability)
        with Checkpoint(folder) as checkpoint:
            stored, main_dtype = list(checkpoint.tensors), checkpoint.main_dtype
            for name in stored:
                checkpoint.check_finite(name)
            weights = checkpoint.without_copies()
        check_projection(source.directory, self._capability, stored)
        dtype = pick_dtype(spec.dtype, main_dtype, device)
        progress(LoadProgress("weights"))
        check_model_type(read_json(folder, "config.json"))
        self._model = model = load_model(source.directory, folder, self._capability, weights)
        transformer = model[0]
        embeds = (Capability.TEXT_EMBEDDING, Capability.MULTI_VECTOR_EMBEDDING)
        reads_texts = self._capability in embeds
        check_weights(transformer.model, stored, unused="pooler." if reads_texts else "")
        model.to(device=device, dtype=dtype).eval()
        model.requires_grad_(False)
        max_tokens = self._take_tokenizer(model)
        self._output = output = OUTPUTS[self._capability](model, self._forward)
        self._splits_prompts = any(
            not getattr(module, "include_prompt", True) for module in output.modules
        )
        config = transformer.model.config
        if self._capability is Capability.IMAGE_EMBEDDING:
            self._images = _image_reader(transformer, spec.max_image_pixels)
        texts = getattr(config, "text_config", config)
        self._check_fixed_ids(texts)
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        workspace = self._workspace(config.to_dict(), max_tokens, dtype)
        info = EncoderInfo(
            kind=self._capability,
            architecture=type(transformer.model).__name__,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            vocab_size=int(texts.vocab_size),
            max_model_len=max_tokens,
            memory_bytes=num_bytes
            + _tokenizer_bytes(texts.vocab_size, device)
            + workspace
            + self._decoding_bytes(device),
            dimensions=output.dimensions,
            ranges=read_ranges(source.directory, output.dimensions) if output.dimensions else b"",
            prompt_names=() if self._capability is Capability.RERANK else tuple(model.prompts),
            is_demo=source.is_demo,
            threads=spec.threads,
            text_width=text_width(config),
            images=None if self._images is None else self._images.fit,
            query_len=self._limits.get("query_len"),
            document_len=self._limits.get("document_len"),
            labels=output.labels,
            must_scale=output.must_scale,
            reads_pairs=self._reads_pairs,
        )
        progress(LoadProgress("warm-up"))
        self._warm_up()
        return info

    def _take_tokenizer(self, model: Any) -> int:
        """Make the tokenizers, and return the most tokens of an input."""
        tokenizer = model.tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise Refusal("its tokenizer is not one of the tokenizers library")
        backend = tokenizer.backend_tokenizer
        special_ids = frozenset(tokenizer.all_special_ids)
        prompts = {name: text or "" for name, text in model.prompts.items()}
        if model.default_prompt_name is not None:
            prompts[""] = prompts.get(model.default_prompt_name, "")
        reads_images = self._capability is Capability.IMAGE_EMBEDDING
        is_rerank, template = self._capability is Capability.RERANK, None
        if not reads_images and self._capability not in AUTO_CLASSES:
            template = input_template(model[0], prompts.get("", ""), is_rerank=is_rerank)
        self._reads_pairs = is_rerank and template is not None
        has_roles = self._capability is Capability.MULTI_VECTOR_EMBEDDING
        if has_roles:
            prompts[""] = prompts.get(document_prompt(prompts), "")
        make = partial(
            InputTokenizer, backend, prompts=prompts, special_ids=special_ids, template=template
        )
        if self._capability is Capability.TOKEN_CLASSIFICATION:
            make = partial(make, spans=Spans(backend.model, tokenizer.unk_token_id))
        own = model[0].document_length if has_roles else None
        max_tokens = max_tokens_of(model, self._spec.max_model_len, own)
        self._input_tokenizer = made = make(max_tokens=max_tokens)
        if self._capability is Capability.SPARSE_EMBEDDING:
            self._input_tokenizer = ApartTokenizer(made, prompts)
        if has_roles:
            most = max_tokens_of(model, self._spec.max_model_len, query_limit(model[0]))
            self._expansion = expansion_of(model[0], most)
            queries = make(max_tokens=most)
            self._input_tokenizer = RolesTokenizer(made, queries, prompts, self._expansion)
            self._limits = {"query_len": most, "document_len": max_tokens}
            max_tokens = max(max_tokens, most)
        self._tokenizer = HfTokenizer(type(backend).from_str(backend.to_str()))
        self._has_types = "token_type_ids" in tokenizer.model_input_names
        self._pad_id = padding_of(model, is_classifier=self._capability in READ_WHOLE)
        # SigLIP's vector of a text and the score of a generating model are read at the last token,
        # so the side of the padding matters.
        self._is_causal = is_causal(model[0])
        kinds = list(model[0].modality_config)
        self._modality = "text" if "text" in kinds else kinds[0]
        is_padded = text_width(model[0].model.config) > 0
        self._pads_left = self._is_causal or (is_padded and tokenizer.padding_side == "left")
        return max_tokens

    def _check_fixed_ids(self, config: Any) -> None:
        """Check ids that do not come from requests: the padding's, that of a query's expansion, and
        types of a pair's tokens.

        Raises:
            Refusal: The model's embeddings have no rows for them.
        """
        if not 0 <= self._pad_id < config.vocab_size:
            raise Refusal(
                f"its padding token has the id {self._pad_id}, outside the vocabulary of "
                f"{config.vocab_size}"
            )
        if self._expansion is not None and self._expansion.token_id >= config.vocab_size:
            raise Refusal(
                f"it expands queries by a token of the id {self._expansion.token_id}, outside the "
                f"vocabulary of {config.vocab_size}"
            )
        num_types = getattr(config, "type_vocab_size", None)
        if self._has_types and num_types and self._capability in READ_WHOLE:
            [pair] = self.encoder_tokenizer.encode_pairs("a", ["a"])
            if (most := max(pair.input.type_ids, default=0)) >= num_types:
                raise Refusal(
                    f"its tokenizer gives a pair's tokens the type {most}, and the model has "
                    f"{num_types}"
                )

    def _warm_up(self) -> None:
        """Compute a short input of each kind and role, so that lazy initialisation happens before
        the first request."""
        inputs: list[AnyInput] = [EncodeInput((self._pad_id,) * 4)]
        if self._capability is Capability.MULTI_VECTOR_EMBEDDING:
            query = EncodeInput((self._pad_id,) * 4, is_query=True)
            inputs.append(query if self._expansion is None else self._expansion.expanded(query))
        if self._images is not None:
            inputs.append(ImageInput(self._images.fit.blank(), self._images.fit.num_tokens))
        for input_ in inputs:
            row = EncodeRow(SequenceId(0), input_, EncodeOptions())
            result = self._execute(EncodePlan(PlanId(0), (row,)))
            if isinstance(result.rows[0], RowFailure):
                raise Refusal("its results are not finite numbers")

    # ---- one step

    def _execute(self, plan: EncodePlan) -> EncodeResult:
        started = perf_counter()
        assert self._output is not None, "the model is loaded"
        self._output.take_queries(plan.rows)
        alike: dict[tuple[int, bool], list[int]] = {}
        for place, row in enumerate(plan.rows):
            text = row.input if isinstance(row.input, EncodeInput) else None
            prompt_tokens = text.prompt_tokens if text is not None and self._splits_prompts else 0
            is_query = text is not None and text.is_query
            alike.setdefault((prompt_tokens, is_query), []).append(place)
        values: dict[int, EncodeRowResult | RowFailure] = {}
        for (prompt_tokens, _), places in alike.items():
            lengths = [plan.rows[place].input.num_tokens for place in places]
            for part in groups(lengths, self._output.tokens_at_once):
                chosen = places[part]
                rows = [plan.rows[place] for place in chosen]
                values.update(zip(chosen, self._encode(rows, prompt_tokens), strict=True))
        results = tuple(values[place] for place in range(len(plan.rows)))
        return EncodeResult(plan.plan_id, results, StepTimings(forward_s=perf_counter() - started))

    def _encode(
        self, rows: Sequence[EncodeRow], prompt_tokens: int
    ) -> Iterator[EncodeRowResult | RowFailure]:
        """Compute rows of similar length in one forward and yield their results in order."""
        assert self._output is not None, "the model is loaded"
        features = self._forward([row.input for row in rows], prompt_tokens)
        for row, result in zip(rows, self._output.results(features, rows), strict=True):
            if isinstance(result, EncodeRowResult):
                yield result
            else:
                what = "its values are not finite" if result is None else str(result)
                yield RowFailure(row.sequence, RowPhase.ENCODE, what, result)

    def _forward(self, inputs: Sequence[AnyInput], prompt_tokens: int = 0) -> dict[str, Any]:
        """Return the output of the modules for inputs of one kind, either queries or others. The
        pooling leaves the first ``prompt_tokens`` out."""
        assert self._output is not None, "the model is loaded"
        if inputs[0].kind is InputKind.IMAGE:
            features = self._image_features(inputs)
        else:
            features = self._features(inputs)
        if prompt_tokens and self._splits_prompts:
            features["prompt_length"] = prompt_tokens
        task = "query" if getattr(inputs[0], "is_query", False) else "document"
        for module in self._output.modules:
            own = {"task": task} if "task" in getattr(module, "forward_kwargs", ()) else {}
            features = module(features, **own)
        return features

    def _image_features(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the forward's arguments for images."""
        assert self._images is not None, "the model has no images, so no plan has any"
        return self._images.features([input_.image for input_ in inputs], self._device)

    def _features(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Return the forward's arguments for texts, padded: [inputs, longest] int64 each."""
        shape = (len(inputs), max(input_.num_tokens for input_ in inputs))
        ids = np.full(shape, self._pad_id, dtype=np.int64)
        mask = np.zeros(shape, dtype=np.int64)
        types = np.zeros(shape, dtype=np.int64)
        places = np.zeros(shape, dtype=np.bool_)  # of the tokens that lengthen queries
        for place, input_ in enumerate(inputs):
            length = len(input_.token_ids)
            start = shape[1] - length if self._pads_left else 0
            ids[place, start : start + length] = input_.token_ids
            mask[place, start : start + length] = 1
            if input_.type_ids:
                types[place, start : start + length] = input_.type_ids
            if input_.expanded:
                places[place, start + length - input_.expanded : start + length] = True
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self._expansion is not None:
            arrays["query_expansion_positions"] = places
            if not self._expansion.attends:
                mask[places] = 0
        if self._has_types:
            arrays["token_type_ids"] = types
        if self._is_causal:  # positions count from an input's first token, after the padding
            arrays["position_ids"] = np.maximum(mask.cumsum(axis=1) - 1, 0)
        made: dict[str, Any] = {
            name: torch.from_numpy(array).to(self._device) for name, array in arrays.items()
        }
        if self._is_causal:
            made["logits_to_keep"] = 1
        return made | {"modality": self._modality}


def _tokenizer_bytes(vocab_size: int | None, device: torch.device) -> int:
    """Return the bytes of the tokenizers: the library's, that of inputs, and that of plain text."""
    return 3 * tokenizer_bytes(vocab_size or 0, str(device))


def groups(lengths: Sequence[int], most: int | None = None) -> Iterator[slice]:
    """Split rows of ascending lengths into groups whose padding costs less than a forward, and
    which have at most ``most`` tokens with it, unless a row alone has more."""
    end = len(lengths)
    while end:
        start, padding, longest = end - 1, 0, lengths[end - 1]
        first = 0 if most is None else end - max(1, most // longest)
        while start > max(first, 0):
            padding += longest - lengths[start - 1]
            if padding > GROUP_COST_TOKENS:
                break
            start -= 1
        yield slice(start, end)
        end = start


def _image_reader(transformer: Any, max_pixels: int) -> ImageReader:
    """Return the reader of a model's images.

    Raises:
        Refusal: The model's files change the processing of texts or images in an unsupported way.
    """
    methods = {kind: modality["method"] for kind, modality in transformer.modality_config.items()}
    wanted = {"text": "get_text_features", "image": "get_image_features"}
    if methods != wanted or transformer.module_output_name != "sentence_embedding":
        raise Refusal("it does not turn texts and images into vectors as CLIP and SigLIP do")
    if set(transformer.processing_kwargs) & {"common", "image"}:
        raise Refusal("its sentence_bert_config.json changes how images are read")
    processor = transformer.processor.image_processor
    return ImageReader(processor, transformer.model.config, max_pixels)
