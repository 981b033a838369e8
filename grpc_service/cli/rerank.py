"""``triolet rerank``: sorts documents by how well they answer a query, best first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_texts
from grpc_service.cli.texts import progress, results_of, texts_of
from grpc_service.client import messages

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from grpc_service.client import Client, Stream

    Response = messages.RerankResponse


def run(args: argparse.Namespace) -> int:
    """Score the documents and print them. Return the exit code."""
    documents = texts_of(args.documents, args.file, "documents")

    def job(client: Client) -> None:
        def ask(part: Sequence[str], timeout_s: float | None) -> Stream[Response]:
            return client.rerank(request_of(args, part), timeout=timeout_s)

        with progress("reranking", len(documents), is_quiet=False) as advance:
            scores: list[Response] = list(results_of(documents, ask, args.timeout, advance))
        scores.sort(key=lambda score: (-score.score, score.index))
        show = print_json if args.json else print_scores
        show(documents, scores[: args.top_n])

    return run_client(args, job)


def request_of(args: argparse.Namespace, documents: Sequence[str]) -> messages.RerankRequest:
    """Return the request. Flags that are not given stay unset, so that the model's own defaults
    apply."""
    return messages.RerankRequest(
        model=args.model,
        query=args.query,
        documents=documents,
        raw_scores=True if args.raw_scores else None,
        truncate=args.truncate,
        top_n=args.top_n,
    )


def print_json(_: Sequence[str], scores: Sequence[Response]) -> None:
    """Print one line of JSON per document, best first."""
    for score in scores:
        print(json.dumps({"index": score.index, "score": score.score}))


def print_scores(documents: Sequence[str], scores: Sequence[Response]) -> None:
    """Print one line per document, best first."""
    rows = [[f"{score.score:.4f}", str(score.index)] for score in scores]
    print_texts(("SCORE", "INDEX", "DOCUMENT"), rows, [documents[score.index] for score in scores])
