"""Architectures of transformers that cannot run under the rolling batch; option.rolling_batch=auto avoids it for them.

The load itself refuses any other model that the rolling batch does not serve exactly.
"""

from __future__ import annotations

# fmt: off
_WITH_STATE = frozenset(
    {
        "BambaForCausalLM", "DeepseekV4ForCausalLM", "FalconH1ForCausalLM", "FalconMambaForCausalLM",
        "GraniteMoeHybridForCausalLM", "JambaForCausalLM", "KimiLinearForCausalLM", "Mamba2ForCausalLM",
        "MambaForCausalLM", "NemotronHForCausalLM", "OlmoHybridForCausalLM", "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen4ExpForCausalLM", "RecurrentGemmaForCausalLM",
        "RwkvForCausalLM", "Zamba2ForCausalLM", "ZambaForCausalLM", "ZayaForCausalLM", "xLSTMForCausalLM",
    }
)
_WITHOUT_INTERFACE = frozenset(
    {
        "BigBirdForCausalLM", "BloomForCausalLM", "CodeGenForCausalLM", "CpmAntForCausalLM", "FalconForCausalLM",
        "GPTJForCausalLM", "GPTNeoForCausalLM", "GPTNeoXJapaneseForCausalLM", "GotOcr2ForConditionalGeneration",
        "MegatronBertForCausalLM", "MptForCausalLM", "MvpForCausalLM", "OpenAIGPTLMHeadModel",
        "ProphetNetForCausalLM", "ReformerModelWithLMHead", "RemBertForCausalLM", "RoFormerForCausalLM",
        "TrOCRForCausalLM", "XGLMForCausalLM", "XLMWithLMHeadModel", "XLNetLMHeadModel",
    }
)
# fmt: on
_WITH_INDEXER = frozenset({"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"})
UNBATCHED = _WITH_STATE | _WITHOUT_INTERFACE | _WITH_INDEXER
"""Those that keep a state beside keys and values, those without transformers' attention interface, and those whose
attention asks an index which tokens it sees."""
