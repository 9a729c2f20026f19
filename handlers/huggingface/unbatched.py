"""Architectures of transformers that cannot run under the rolling batch; option.rolling_batch=auto avoids it for them.

The load itself refuses any other model that the rolling batch does not serve exactly.
"""

from __future__ import annotations

# fmt: off
_WITH_STATE = frozenset(
    {
        "DeepseekV4ForCausalLM", "HrmTextForCausalLM", "Qwen4ExpForCausalLM",
    }
)
_WITHOUT_INTERFACE = frozenset(
    {
        "BigBirdForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "CpmAntForCausalLM", "FalconForCausalLM",
        "GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM", "GitForCausalLM",
        "MegatronBertForCausalLM", "MptForCausalLM", "MvpForCausalLM", "OpenAIGPTLMHeadModel",
        "ProphetNetForCausalLM", "ReformerModelWithLMHead", "RemBertForCausalLM", "RoFormerForCausalLM",
        "TrOCRForCausalLM", "XGLMForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
    }
)
_WITH_OTHER_ATTENTION = frozenset(  # biases, masks or indexes of their own, heads that are subtracted
    {
        "AXK2ForCausalLM", "DeepseekV32ForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM",
        "GlmMoeDsaForCausalLM", "HYV4ForCausalLM", "InklingForCausalLM",
    }
)
# fmt: on
UNBATCHED = _WITH_STATE | _WITHOUT_INTERFACE | _WITH_OTHER_ATTENTION
"""Those that keep a state beside keys and values, those without transformers' attention interface, and those whose
attention the rolling batch does not compute."""
