"""Makes the checkpoint beside this file, in the layout in which models are published: pip install safetensors numpy ml_dtypes."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

here = pathlib.Path(__file__).parent
hidden, ffn, vocab, layers, heads, kv = 16, 24, 32, 2, 4, 2
draw = np.random.default_rng(0)
shapes = {"model.embed_tokens.weight": (vocab, hidden)}
for i in range(layers):
    p = f"model.layers.{i}."
    head = hidden // heads
    shapes |= {
        p + "self_attn.q_proj.weight": (hidden, hidden),
        p + "self_attn.k_proj.weight": (kv * head, hidden),
        p + "self_attn.v_proj.weight": (kv * head, hidden),
        p + "self_attn.o_proj.weight": (hidden, hidden),
        p + "mlp.gate_proj.weight": (ffn, hidden),
        p + "mlp.up_proj.weight": (ffn, hidden),
        p + "mlp.down_proj.weight": (hidden, ffn),
        p + "input_layernorm.weight": (hidden,),
        p + "post_attention_layernorm.weight": (hidden,),
    }
shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}
tensors = {n: (draw.standard_normal(s) * 0.1).astype(ml_dtypes.bfloat16) for n, s in shapes.items()}
# A buffer that old checkpoints hold; it is no weight.
for i in range(layers):
    tensors[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = (1 / 10000 ** (np.arange(0, 4, 2) / 4)).astype(np.float32)

names, count = list(tensors), 3
files = {n: f"model-{1 + i * count // len(names):05}-of-{count:05}.safetensors" for i, n in enumerate(names)}
for file in sorted(set(files.values())):
    save_file({n: t for n, t in tensors.items() if files[n] == file}, here / file, metadata={"format": "pt"})
index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": dict(sorted(files.items()))}
(here / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": vocab,
    "hidden_size": hidden,
    "intermediate_size": ffn,
    "num_hidden_layers": layers,
    "num_attention_heads": heads,
    "num_key_value_heads": kv,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
(here / "config.json").write_text(json.dumps(config, indent=2) + "\n")
