"""What vLLM has to be told about a drafter besides its folder; the model card says it, the server we start gets it."""

from collections.abc import Sequence


def vllm_environment(layer_types: Sequence[str]) -> dict[str, str]:
    """What vLLM needs in its environment to serve a drafter of these layers.

    vLLM 0.32 serves drafters that mix sliding and full layers by its second model runner only, and refuses them where
    it has chosen the first.
    """
    return {"VLLM_USE_V2_MODEL_RUNNER": "1"} if len(set(layer_types)) > 1 else {}
