"""``triolet rerank``: documents by how well they answer a query, best first."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from grpc_service._generated.triolet.v1 import inference_pb2, inference_pb2_grpc
from grpc_service.cli.client import run_client
from grpc_service.cli.query import print_table
from grpc_service.cli.texts import fitted, progress, results_of, texts_of

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    import grpc

    Response = inference_pb2.RerankResponse


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    documents = texts_of(args.documents, args.file, "documents")

    def job(channel: grpc.Channel) -> None:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def ask(part: Sequence[str], timeout_s: float | None) -> Any:
            return stub.Rerank(request_of(args, part), timeout=timeout_s)

        with progress("reranking", len(documents), is_quiet=False) as advance:
            scores: list[Response] = list(results_of(documents, ask, args.timeout, advance))
        scores.sort(key=lambda one: (-one.score, one.index))
        show = print_json if args.json else print_scores
        show(documents, scores[: args.top_n])

    return run_client(args, job)


def request_of(args: argparse.Namespace, documents: Sequence[str]) -> inference_pb2.RerankRequest:
    """Flags that are not given stay unset, so that the model's own defaults hold."""
    return inference_pb2.RerankRequest(
        model=args.model,
        query=args.query,
        documents=documents,
        raw_scores=True if args.raw_scores else None,
        truncate=args.truncate,
        top_n=args.top_n,
    )


def print_json(_: Sequence[str], scores: Sequence[Response]) -> None:
    """A line of JSON per document, best first."""
    for one in scores:
        print(json.dumps({"index": one.index, "score": one.score}))


def print_scores(documents: Sequence[str], scores: Sequence[Response]) -> None:
    """A line per document, best first."""
    rows = [[f"{one.score:.4f}", str(one.index)] for one in scores]
    head = ("SCORE", "INDEX")
    widths = [max(map(len, column)) + 2 for column in zip(head, *rows, strict=True)]
    for row, one in zip(rows, scores, strict=True):
        row.append(fitted(documents[one.index], sum(widths)))
    print_table((*head, "DOCUMENT"), rows)
