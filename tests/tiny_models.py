"""Tiny untrained models of many families, built on the spot; they differ in head, positions, attention and caches."""

from __future__ import annotations

from typing import Any

SHAPE = {"vocab_size": 517, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SPECIAL = {"num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "initializer_range": 0.3}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},  # learned positions
    "llama": {},
    "gemma2": {"head_dim": 16, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 16, "sliding_window": 4},
    "cohere": {"logit_scale": 0.25},
    "granite": {"logits_scaling": 4.0},
    "phi": {},  # a biased head
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},  # hidden states are projected before the head
    "gpt_neox": {},
    "mistral": {"sliding_window": 4},
    "bloom": {"n_head": 2, "n_layer": 2},  # positions in the attention bias
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
}


def tiny_family(name: str, **changes: Any) -> Any:
    """An untrained model of a family, with weights large enough that its distributions are not flat."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(1)
    extra = {"sliding_window": None} if name == "mamba" else FAMILIES.get(name, {})
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**(SHAPE | SPECIAL | extra | changes)))
    if name == "phi":
        torch.nn.init.normal_(model.lm_head.bias)
    return model
