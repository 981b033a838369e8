"""How many values the repeated fields and maps of vllm_engine.proto may have, by their full names.

The proto is smg-grpc-proto's, whose comments have no limits. The limits are those of the
fields of triolet.v1 with the same meaning. The limits of fields that this server refuses by name
are guesses: high enough that an honest request is refused for the field, not for its count.
"""

from __future__ import annotations

from grpc_service._generated.triolet.v1.count_limits import COUNT_LIMITS as OWN

_REFUSED = 4096, None
LIMITS = {
    "vllm.grpc.engine.AbortRequest.request_ids": OWN["triolet.v1.AbortRequest.request_ids"],
    "vllm.grpc.engine.ChoiceConstraint.choices": OWN["triolet.v1.Choice.choices"],
    "vllm.grpc.engine.GetLoadsRequest.include": (64, None),
    "vllm.grpc.engine.SamplingParams.logit_bias": OWN["triolet.v1.SamplingParams.logit_bias"],
    "vllm.grpc.engine.SamplingParams.stop": OWN["triolet.v1.SamplingParams.stop"],
    "vllm.grpc.engine.SamplingParams.stop_token_ids": OWN[
        "triolet.v1.SamplingParams.stop_token_ids"
    ],
    "vllm.grpc.engine.TokenizedInput.input_ids": OWN["triolet.v1.TokenIds.ids"],
    "smg.grpc.common.StartProfileRequest.activities": (64, None),
    **dict.fromkeys(
        [
            "vllm.grpc.engine.GenerateRequest.extra_mm_inputs",
            "vllm.grpc.engine.MediaRefs.items",
            "vllm.grpc.engine.TensorData.shape",
            *(
                f"vllm.grpc.engine.MultimodalInputs.{name}"
                for name in (
                    *("model_specific_tensors", "mm_placeholders", "mm_hashes", "batched_keys"),
                    *("flat_keys", "keep_on_cpu_keys"),
                )
            ),
        ],
        _REFUSED,
    ),
}
