"""Architectures of transformers that cannot run under the rolling batch; option.rolling_batch=auto avoids it for them.

The load itself refuses any other model that the rolling batch does not serve exactly.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

UNBATCHED: Mapping[str, str] = MappingProxyType(
    {
        "CpmAntForCausalLM": "each call computes positions and masks of the whole text",
        "DeepseekV4ForCausalLM": "its layers compress windows of tokens in caches of their own",
        "DogeForCausalLM": "its mask follows from the values of all tokens so far",
        "InklingForCausalLM": "its attention adds a bias that it computes from each query",
        "OpenAIGPTLMHeadModel": "it has no KV cache: each token computes the whole text",
        "ProphetNetForCausalLM": "its cache takes one token at a time, beside streams for tokens to come",
        "Qwen4ExpForCausalLM": "it keeps raw keys of an index and the context of an n-gram layer in its own cache",
        "ReformerModelWithLMHead": "its attention sorts the whole text into buckets",
        "XLMWithLMHeadModel": "it predicts each token in the place of a mask token behind the text",
        "XLNetLMHeadModel": "it predicts each token in the place of a dummy token behind the text",
    }
)
"""Each architecture, and why the rolling batch does not compute it."""
