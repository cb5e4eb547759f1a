# SPDX-License-Identifier: Apache-2.0
"""A model of which only the geometry is given."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Model:
    """A Llama of this geometry, with random weights."""

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_heads: int = 32
    num_kv_heads: int = 32
    num_layers: int = 4
    vocab_size: int = 32000

    def save(self, folder: Path, **others: Any) -> str:
        """Writes what vLLM needs to know about it and returns the folder's name.

        Args:
            others: of the configuration, in place of these or beside them.
        """
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "num_hidden_layers": self.num_layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
            **others,
        }
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)
