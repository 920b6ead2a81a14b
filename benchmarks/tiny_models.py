"""Small real models of many architectures, for counts of what they execute."""

from __future__ import annotations

import logging
from collections.abc import Callable

logging.getLogger("transformers").setLevel(logging.ERROR)

import transformers as hf  # noqa: E402
from transformers import PretrainedConfig  # noqa: E402

_LLAMA_LIKE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,  # not hidden ÷ heads, as in Gemma and Qwen3
    "vocab_size": 131,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}


def _like_llama(config: Callable[..., PretrainedConfig], **fields: object) -> PretrainedConfig:
    return config(**{**_LLAMA_LIKE, **fields})


def configs() -> dict[str, PretrainedConfig]:
    """Return tiny configs by architecture; windows and chunks are far shorter than sequences."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 131}
    return {
        "Llama (GQA)": _like_llama(hf.LlamaConfig),
        "Llama (MQA, tied)": _like_llama(
            hf.LlamaConfig, num_key_value_heads=1, tie_word_embeddings=True
        ),
        "GPT-2": hf.GPT2Config(n_embd=64, n_layer=3, n_head=4, **ids),
        "OPT": hf.OPTConfig(
            hidden_size=64,
            ffn_dim=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            word_embed_proj_dim=64,
            **ids,
        ),
        "GPT-NeoX": hf.GPTNeoXConfig(
            hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, **ids
        ),
        "Bloom (own attention)": hf.BloomConfig(hidden_size=64, n_layer=3, n_head=4, **ids),
        "Falcon (own attention)": hf.FalconConfig(
            hidden_size=64, num_hidden_layers=3, num_attention_heads=4, **ids
        ),
        "Qwen2": _like_llama(hf.Qwen2Config),
        "Qwen3": _like_llama(hf.Qwen3Config),
        "Mistral (sliding)": _like_llama(hf.MistralConfig, sliding_window=32),
        "Phi-3": _like_llama(hf.Phi3Config, head_dim=16),
        "Gemma 2 (alternating)": _like_llama(hf.Gemma2Config, sliding_window=32),
        "Gemma 3 (alternating)": _like_llama(
            hf.Gemma3TextConfig, sliding_window=32, num_hidden_layers=7
        ),
        "OLMo 2": _like_llama(hf.Olmo2Config),
        "Cohere": _like_llama(hf.CohereConfig),
        "Mixtral (MoE)": _like_llama(hf.MixtralConfig, num_local_experts=4),
        "Qwen3-MoE": _like_llama(hf.Qwen3MoeConfig, **_EXPERTS),
        "GPT-OSS (MoE, sliding)": _like_llama(
            hf.GptOssConfig, num_local_experts=4, num_experts_per_tok=2, sliding_window=32
        ),
        "GLM-4-MoE (shared expert)": _like_llama(
            hf.Glm4MoeConfig,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=40,
            first_k_dense_replace=1,
        ),
        "DeepSeek-V3 (MLA, MoE)": _like_llama(
            hf.DeepseekV3Config,
            num_key_value_heads=4,
            moe_intermediate_size=40,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            q_lora_rank=32,
            kv_lora_rank=16,
            head_dim=8,
            qk_rope_head_dim=8,
            qk_nope_head_dim=12,
            v_head_dim=20,
        ),
        "Llama 4 (chunked, MoE)": _like_llama(
            hf.Llama4TextConfig,
            num_local_experts=4,
            intermediate_size_mlp=72,
            attention_chunk_size=32,
        ),
        "Mamba": hf.MambaConfig(
            hidden_size=64, num_hidden_layers=1, state_size=16, use_mambapy=False, **ids
        ),
        "Mamba 2": hf.Mamba2Config(
            hidden_size=64,
            num_hidden_layers=2,
            num_heads=8,
            head_dim=16,
            state_size=16,
            n_groups=2,
            chunk_size=64,
            **ids,
        ),
        "Falcon-H1 (hybrid)": _like_llama(
            hf.FalconH1Config, mamba_d_ssm=128, mamba_chunk_size=64, **_MAMBA_2
        ),
        "Qwen3-Next (linear attention)": _like_llama(
            hf.Qwen3NextConfig, **_EXPERTS, shared_expert_intermediate_size=40
        ),
        "Jamba (hybrid, MoE)": _like_llama(
            hf.JambaConfig,
            num_experts=2,
            attn_layer_period=2,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            use_mamba_kernels=False,
        ),
    }
