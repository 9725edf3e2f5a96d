"""Small models of Hugging Face's, made from configurations with random weights and saved to a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie import randomness

TARGETS = {
    "bert": "q+v",
    "roberta": "q+v",
    "distilbert": "q+k+v+o",
    "gpt2": "c_attn+c_fc",
    "llama": "q+v",
    "vit": "q+v",
}
"""Kinds of models, with layers that get adapters."""

_COMMON = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 20}


def _config(kind: str) -> Any:
    import transformers

    words: dict[str, Any] = {"vocab_size": 30, "max_position_embeddings": 16}
    match kind:
        case "bert":
            return transformers.BertConfig(**_COMMON, **words)
        case "roberta":
            return transformers.RobertaConfig(**_COMMON, **words)
        case "distilbert":
            return transformers.DistilBertConfig(**words, dim=16, n_layers=2, n_heads=2, hidden_dim=20)
        case "gpt2":
            special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
            return transformers.GPT2Config(vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, **special)
        case "llama":
            return transformers.LlamaConfig(**_COMMON, **words, num_key_value_heads=1, pad_token_id=0)
        case _:
            return transformers.ViTConfig(**_COMMON, image_size=8, patch_size=4, num_channels=1)


def save(kind: str, folder: Path) -> Path:
    """Write a model of a kind into a folder."""
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    with randomness.torch_stream(1, f"saved {kind}"):
        transformers.AutoModel.from_config(_config(kind)).save_pretrained(folder)
    return folder
