"""The model of `benches/speed.rs` in PyTorch DDP over gloo: 2 processes of one thread each. Prints milliseconds a step (median and best) and tokens a second."""

import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, SEQ, STEPS = 8, 256, int(sys.argv[1]) if len(sys.argv) > 1 else 12


def rank(index, world):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=index, world_size=world)
    torch.manual_seed(1)
    config = LlamaConfig(vocab_size=259, hidden_size=384, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=6,
                         num_key_value_heads=6, max_position_embeddings=SEQ, tie_word_embeddings=False, use_cache=False)
    model = torch.nn.parallel.DistributedDataParallel(LlamaForCausalLM(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens = torch.randint(0, 256, (BATCH // world, SEQ))
    seconds = []
    for step in range(STEPS + 2):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.barrier()
        if step >= 2:
            seconds.append(time.perf_counter() - begin)
    if index == 0:
        median = statistics.median(seconds)
        print(f"PyTorch {torch.__version__} DDP over gloo, 2 x 1 thread: {1e3 * median:.1f} ms/step (best {1e3 * min(seconds):.1f}), "
              f"{BATCH * SEQ / median:.0f} tokens/s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(rank, args=(2,), nprocs=2)
