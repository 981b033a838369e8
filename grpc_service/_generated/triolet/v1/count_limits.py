"""Written by tools/regen_proto.py from the comments of the protos; do not edit."""

# By the full name of a field: values, and levels of a tree of JSON values.
COUNT_LIMITS: dict[str, tuple[int, int | None]] = {
    "triolet.v1.AbortRequest.request_ids": (1024, None),
    "triolet.v1.AttachRequest.received": (16, None),
    "triolet.v1.Chat.messages": (4096, None),
    "triolet.v1.Chat.template_args": (16384, 30),
    "triolet.v1.Chat.tools": (1024, None),
    "triolet.v1.Choice.choices": (32768, None),
    "triolet.v1.Continuation.choices": (16, None),
    "triolet.v1.ContinuedChoice.token_ids": (262144, None),
    "triolet.v1.DetokenizeRequest.ids": (262144, None),
    "triolet.v1.EmbedRequest.inputs": (2048, None),
    "triolet.v1.LoadAdapterRequest.aliases": (64, None),
    "triolet.v1.Message.parts": (4096, None),
    "triolet.v1.Message.tool_calls": (4096, None),
    "triolet.v1.RerankRequest.documents": (2048, None),
    "triolet.v1.SamplingParams.allowed_token_ids": (262144, None),
    "triolet.v1.SamplingParams.bad_words": (64, None),
    "triolet.v1.SamplingParams.banned_token_ids": (262144, None),
    "triolet.v1.SamplingParams.logit_bias": (1024, None),
    "triolet.v1.SamplingParams.stop": (16, None),
    "triolet.v1.SamplingParams.stop_token_ids": (65536, None),
    "triolet.v1.TokenIds.ids": (262144, None),
    "triolet.v1.Tool.parameters": (16384, 30),
    "triolet.v1.VectorRanges.high": (65536, None),
    "triolet.v1.VectorRanges.low": (65536, None),
}
