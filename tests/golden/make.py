"""Makes the golden files beside it (all, or those of the families named): small models of PyTorch `transformers`, in f64, trained for two steps.

    python -m venv v && v/bin/pip install torch transformers && v/bin/python tests/golden/make.py

Weights are not stored: element i of the tensor called `name` is a function of name and i (`value`), which `tests/golden.rs` computes too. Of gradients and
final weights the norm and the inner product with another such function are stored, tensor by tensor. Made with torch 2.15.0, transformers 5.24.0.
"""
import copy, json, os, shutil, sys, tempfile

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

BASE = dict(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, max_position_embeddings=32,
            bos_token_id=0, eos_token_id=1, pad_token_id=None, tie_word_embeddings=False, rope_theta=100.0)
YARN = dict(factor=4.0, original_max_position_embeddings=8, beta_fast=2, beta_slow=1)
LATENT = dict(num_key_value_heads=4, kv_lora_rank=6, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5, n_routed_experts=8,
              num_experts_per_tok=3, n_group=4, topk_group=2, moe_intermediate_size=7, first_k_dense_replace=1)
FAMILIES = dict(
    gpt_neox=dict(rotary_pct=0.5, rotary_emb_base=100, hidden_act="gelu", use_parallel_residual=True),
    phi=dict(partial_rotary_factor=0.5, hidden_act="gelu_new", qk_layernorm=True, num_key_value_heads=2),
    phi3=dict(num_key_value_heads=2, partial_rotary_factor=0.5, sliding_window=5),
    olmo2=dict(num_key_value_heads=2),
    olmo3=dict(num_key_value_heads=2, rope_theta=500000.0, sliding_window=4, layer_types=["sliding_attention", "full_attention"], rope_scaling=dict(rope_type="yarn", **YARN)),
    qwen3_moe=dict(num_key_value_heads=2, head_dim=6, moe_intermediate_size=10, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True,
                   mlp_only_layers=[0]),
    deepseek_v2=dict(q_lora_rank=None, topk_method="group_limited_greedy", n_shared_experts=2, routed_scaling_factor=1.5, **LATENT),
    deepseek_v3=dict(q_lora_rank=8, n_shared_experts=1, routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=0,
                     rope_scaling=dict(type="yarn", mscale=1.0, mscale_all_dim=1.0, **YARN), **LATENT),
    minimax_m2=dict(num_key_value_heads=2, head_dim=6, rotary_dim=4, num_local_experts=6, num_experts_per_tok=2, intermediate_size=9),
    gpt_oss=dict(num_key_value_heads=2, head_dim=6, num_local_experts=6, num_experts_per_tok=2, intermediate_size=9, sliding_window=4,
                 layer_types=["sliding_attention", "full_attention"], rope_scaling=dict(rope_type="yarn", truncate=False, **YARN)),
)
BATCH, SEQ, STEPS = 2, 12, 2
M = (1 << 64) - 1


def mix(x):
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        z = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def draw(name, count):
    """Multiples of 2^-16 in [-1/2, 1/2)."""
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & M
    bits = mix(np.full(count, h, dtype=np.uint64) ^ np.arange(count, dtype=np.uint64))
    return (bits >> np.uint64(48)).astype(np.float64) / 65536 - 0.5


def value(name, shape):
    x = draw(name, int(np.prod(shape))).reshape(shape)
    if len(shape) > 1:
        return x
    return (1.0 if "norm" in name and name.endswith("weight") else 0.0) + x / 2


def checkpoint(model, values=None):
    """The model's tensors, or others in their place, by their names in a checkpoint."""
    m = copy.deepcopy(model)
    if values is not None:
        with torch.no_grad():
            for n, p in m.named_parameters():
                p.copy_(values[n])
            for n, b in m.named_buffers():
                if "correction" in n:
                    b.zero_()
    with tempfile.TemporaryDirectory() as d:
        m.save_pretrained(d)
        return load_file(d + "/model.safetensors")


def digest(tensors):
    out = {}
    for name, t in sorted(tensors.items()):
        t = t.double().flatten().numpy()
        out[name] = [float(np.linalg.norm(t)), float(t @ draw("probe." + name, t.size))]
    return out


for family, extra in FAMILIES.items():
    if sys.argv[1:] and family not in sys.argv[1:]:
        continue
    config = {**BASE, "model_type": family, **extra}
    with tempfile.TemporaryDirectory() as d:
        json.dump(config, open(d + "/config.json", "w"))
        loaded = AutoConfig.from_pretrained(d, attn_implementation="eager")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(loaded, dtype=torch.float64)
        model.save_pretrained(d)
        names = load_file(d + "/model.safetensors")
        save_file({n: torch.from_numpy(value(n, tuple(t.shape))) for n, t in names.items()}, d + "/model.safetensors", metadata={"format": "pt"})
        json.dump(config, open(d + "/config.json", "w"))
        model = AutoModelForCausalLM.from_pretrained(d, dtype=torch.float64, attn_implementation="eager",
                                                     experts_implementation="eager").double()
    model.train()
    for n, t in checkpoint(model).items():
        assert np.array_equal(t.double().numpy(), value(n, tuple(t.shape))), n
    tokens = [[[int(65536 * (x + 0.5)) % config["vocab_size"] for x in draw(f"tokens.{s}.{r}", SEQ + 1)] for r in range(BATCH)] for s in range(STEPS)]
    ids = torch.tensor(tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
    losses, norms, grads = [], [], None
    for s in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=ids[s, :, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[s, :, 1:].reshape(-1))
        loss.backward()
        if grads is None:
            grads = digest(checkpoint(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        losses.append(loss.item())
        optimizer.step()
    expected = dict(config=config, batch=BATCH, seq=SEQ, params=sum(p.numel() for p in model.parameters()), tokens=tokens, loss=losses, norm=norms,
                    grads=grads, final=digest(checkpoint(model)))
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), family + ".json")
    # A padding token would get no gradient, hence none above. An epsilon of 1e-4 drowns gradients that are zero but for rounding.
    # Nine digits are more than the f32 tables of the reference's rotations leave.
    text = json.dumps(json.loads(json.dumps(expected), parse_float=lambda x: float(f"{float(x):.9g}")), separators=(",", ":"))
    open(path, "w").write(text + "\n")
    print(family, losses, norms, os.path.getsize(path))
