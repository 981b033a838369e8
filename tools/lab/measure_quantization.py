"""Measures what a dtype, weights of 8 or 4 bits or a narrow KV pool cost a text model's accuracy.

    python -m tools.lab.measure_quantization                   the shipped story model
    python -m tools.lab.measure_quantization DIR --text FILE   another model, over a text

The bench `quantization` keeps the figures of the story model.

Every combination is compared with the stock model in float32 over the same tokens: the mean
Kullback-Leibler divergence of the next token's distribution, the share of positions where the most
likely token is the same, and the growth of perplexity. A KV pool of another dtype than the model's
is read as decodes read it, by steps of few tokens. For the story model there is also the share of
sentences of 100 stories, sampled at temperature 0.8, that the stories' grammar accepts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from engine.core.common.types import BlockId, PlanId, SequenceId
from engine.core.text.plan import AdmittedSequence, BlockDelta, Logits, Row, StepPlan
from engine.core.text.types import Sampling, Stops
from engine.requests.text.values import SamplingParams
from engine.worker.forward.packing import SHORT_MAX
from engine.worker.forward.reference_attention import ReferenceBackend
from engine.worker.interface import RunnerSpec
from engine.worker.text.runner import TorchRunner

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

STORIES = Path(__file__).parents[2] / "engine" / "demo" / "stories"
WAYS = (  # the dtype, the weights' quantization, and the KV pool's dtype
    *(
        (dtype, quantization, dtype)
        for dtype in ("float32", "bfloat16")
        for quantization in ("none", "int8", "int4")
    ),
    *(("float32", "none", pool) for pool in ("float16", "bfloat16", "int8")),
    *(("bfloat16", "none", pool) for pool in ("float32", "int8")),
)
PIECE = 256  # tokens
PIECES = 16
NUM_STORIES = 100
NUM_SHOWN = 64  # most positions of a step, which bounds the memory for logits


class Model:
    """A model in one dtype and quantization, which computes the logits of whole texts."""

    def __init__(
        self,
        directory: str,
        dtype: str,
        quantization: str,
        *,
        is_stock: bool,
        kv_cache_dtype: str = "auto",
    ) -> None:
        spec = RunnerSpec(
            directory,
            dtype=dtype,
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            kv_bytes=1 << 28,
            max_num_seqs=1,
        )
        self._runner = TorchRunner(spec, ReferenceBackend() if is_stock else None)
        self._runner.load(lambda _progress: None)
        self.num_bytes = self._runner._model.num_bytes  # type: ignore[union-attr]
        self._next = 0
        # Prompts and decodes attend by other kernels, and that of decodes multiplies integers.
        self._step = NUM_SHOWN if kv_cache_dtype in ("auto", dtype) else SHORT_MAX

    def tokens_of(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        return list(self._runner.tokenizer.encode(text))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the logits of the runner's forward, [len(tokens), vocab] float32."""
        seen: list[torch.Tensor] = []
        module = self._runner._model.module  # type: ignore[union-attr]
        hook = module.register_forward_hook(
            lambda _m, _a, output: seen.append(output.logits[0].float().clone())
        )
        self._next += 1
        sequence = SequenceId(self._next)
        new = AdmittedSequence(
            sequence, tuple(tokens), Sampling(prompt_logprobs=0), Stops(max_tokens=1)
        )
        blocks = BlockDelta(0, tuple(BlockId(i) for i in range(-(-len(tokens) // 16))))
        try:
            for start in range(0, len(tokens), self._step):
                count = min(self._step, len(tokens) - start)
                is_last = start + count == len(tokens)
                wanted = Logits.ALL if is_last else Logits.PROMPT
                row = Row(sequence, start, count, None if start else blocks, wanted)
                admitted = () if start else (new,)
                self._runner.execute(StepPlan(PlanId(self._next), (row,), admitted=admitted))
        finally:
            hook.remove()
            self._runner.execute(StepPlan(PlanId(self._next), (), released=(sequence,)))
        return torch.cat(seen)

    def close(self) -> None:
        """Close the runner."""
        self._runner.close()


def compare(
    own: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], pieces: Sequence[Sequence[int]]
) -> dict[str, float]:
    """Return the figures of a dtype and quantization against the stock model in float32, from the
    logits of both over the same pieces of text."""
    divergence = agreed = positions = 0.0
    losses = [0.0, 0.0]
    for ours, theirs, tokens in zip(own, exact, pieces, strict=True):
        p, q = theirs.double().log_softmax(1), ours.double().log_softmax(1)
        divergence += float((p.exp() * (p - q)).sum())
        agreed += float((p.argmax(1) == q.argmax(1)).sum())
        positions += len(p)
        following = torch.tensor(tokens[1:])[:, None]
        for index, one in enumerate((p, q)):
            losses[index] -= float(one[:-1].gather(1, following).sum())
    scored = positions - len(pieces)
    growth = float(torch.tensor((losses[1] - losses[0]) / scored).exp()) - 1.0
    return {
        "mean_kl_nats": divergence / positions,
        "top1_agreement": agreed / positions,
        "perplexity_growth": growth,
    }


def story_text() -> str:
    """Return stories of the grammar that the model was not trained on."""
    from tools.lab.demo.corpus import training_stories

    return "\n".join(training_stories(987_654, 60))


def accepted_sentences(quantization: str) -> float:
    """Return the share of sentences of sampled stories that the grammar's parser accepts."""
    from tools.lab.demo.corpus import named_prompt
    from tools.lab.demo.measure_stories import MAX_NEW_TOKENS, accepted_share
    from tools.lab.demo.writer import TrioletWriter

    sampling = SamplingParams(
        temperature=0.8, top_k=0, top_p=1.0, min_p=0.0, max_tokens=MAX_NEW_TOKENS
    )
    writer = TrioletWriter(STORIES, sampling, quantization)
    seeds = range(NUM_STORIES)
    prompts = [named_prompt(seed)[0] for seed in seeds]
    return accepted_share(writer.generate_stories(prompts, seeds))


def measure(directory: str, text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield each combination's name and figures, as soon as they are measured."""
    stock = Model(directory, "float32", "none", is_stock=True)
    tokens = stock.tokens_of(text)[: PIECE * PIECES]
    pieces = [tokens[i : i + PIECE] for i in range(0, len(tokens), PIECE)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    exact = [stock.logits(piece) for piece in pieces]
    stock.close()
    for dtype, quantization, pool in WAYS:
        model = Model(directory, dtype, quantization, is_stock=False, kv_cache_dtype=pool)
        found = compare([model.logits(piece) for piece in pieces], exact, pieces)
        found["weight_bytes"] = model.num_bytes
        model.close()
        if _is_story(directory) and dtype == pool == "float32":
            found["sentences_accepted"] = accepted_sentences(quantization)
        yield way_name(dtype, quantization, pool), found


def way_name(dtype: str, quantization: str, pool: str) -> str:
    """Return the name of a combination: the dtype, and what differs from it."""
    parts = [dtype, "" if quantization == "none" else quantization]
    return " ".join(filter(None, [*parts, "" if pool == dtype else f"with a KV pool of {pool}"]))


def _is_story(directory: str) -> bool:
    return Path(directory).resolve() == STORIES


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("model", nargs="?", default=str(STORIES))
    parser.add_argument("--text", type=Path, help="the text to compare over")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(argv)
    if args.text is None and not _is_story(args.model):
        parser.error("--text is needed for a model other than the shipped one")
    text = args.text.read_text(encoding="utf-8") if args.text else story_text()
    figures: dict[str, dict[str, float]] = {}
    for name, found in measure(args.model, text):
        figures[name] = found
        line = "  ".join(f"{figure} {value:.6g}" for figure, value in found.items())
        print(f"{name:<32}  {line}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
