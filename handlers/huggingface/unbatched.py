"""Architectures of transformers that cannot run under the rolling batch; option.rolling_batch=auto avoids it for them.

The load itself refuses any other model that the rolling batch does not serve exactly.
"""

from __future__ import annotations

# fmt: off
_WITH_STATE = frozenset(
    {
        "DeepseekV4ForCausalLM", "Qwen4ExpForCausalLM",
    }
)
_WITHOUT_INTERFACE = frozenset(
    {
        "CpmAntForCausalLM", "OpenAIGPTLMHeadModel", "ProphetNetForCausalLM", "ReformerModelWithLMHead",
        "XLMWithLMHeadModel", "XLNetLMHeadModel",
    }
)
_WITH_OTHER_ATTENTION = frozenset({"DogeForCausalLM", "InklingForCausalLM"})  # masks and biases of their own
# fmt: on
UNBATCHED = _WITH_STATE | _WITHOUT_INTERFACE | _WITH_OTHER_ATTENTION
"""Those with a state that the rolling batch does not keep, those without transformers' attention interface, and those
whose attention the rolling batch does not compute."""
