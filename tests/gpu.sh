#!/bin/sh
# Checks and measures dplan on a machine with a GPU, and prints a report in Markdown: tests/gpu.sh [DPLAN] > docs/gpu.md
#
# It needs the binary (target/release/dplan if none is named), NVIDIA's driver, and NVRTC (`pip install nvidia-cuda-nvrtc-cu12`); cuBLASLt (`pip install nvidia-cublas-cu12`) is measured if it
# is there. No Rust. It ends with 1 if a check fails. Each part has its limit in seconds; no GPU has shown yet how long all of them take.
#
#   DPLAN_GPU_CASES     shapes that are drawn of each family of kernels (40)
#   DPLAN_GPU_PARTS     which parts: kernels train offload oracles time step
#   DPLAN_GPU_EXAMPLES  where the small models are (examples/)
#   DPLAN_GPU_MODEL     a config of about a billion parameters (one of 1.1 billion, written here)
#   DPLAN_GPU_SHAPE     options of its compilation (--seq 2048 --batch 8)
#   DPLAN_GPU_CLUSTER   what it is planned for (the built-in device that the GPU's name says, else h100:1)
#   DPLAN_GPU_ORACLES   a folder of folders with config.json, weights.safetensors, tokens.json and expected.json of training runs in f32
set -u
# What a command says goes where it is told, what is wrong with it into the report.
exec 3>&1
dplan=${1:-target/release/dplan}
cases=${DPLAN_GPU_CASES:-40}
parts=${DPLAN_GPU_PARTS:-kernels train offload oracles time step}
examples=${DPLAN_GPU_EXAMPLES:-$(cd "$(dirname "$0")/.." && pwd)/examples}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
failed=0

say() { printf '%s\n' "$*"; }
fail() { say "**FAILED: $***" >&3; say >&3; failed=1; }
# limit SECONDS COMMAND...: runs it; what it says to stderr is shown if it fails.
limit() {
    seconds=$1; shift
    timeout "$seconds" "$@" 2> "$work/errors"; status=$?
    [ $status -eq 0 ] && return 0
    { say; say '```'; tail -n 20 "$work/errors"; say '```'; say; } >&3
    if [ $status -eq 124 ]; then fail "\`$(basename "$1") $2\` did not end within $seconds s"; else fail "\`$(basename "$1") $2\` ended with $status"; fi
    return 1
}
wants() { case " $parts " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }
# losses FILE: of the steps that a run printed as JSON.
losses() { sed -n 's/.*"loss":\([-0-9.e+]*\).*"step":.*/\1/p' "$1"; }
# near NAME TOLERANCE FILE FILE: a row of a table, of two lists of losses.
near() {
    paste "$3" "$4" | awk -v name="$1" -v most="$2" '
        { d = $1 - $2; if (d < 0) d = -d; if (NR == 1) first = $1; last = $1; if ($2 == "" || $1 == "") gap = 1; if (d > worst) worst = d }
        END {
            right = NR > 0 && !gap && worst <= most
            printf "| %s | %d | %s -> %s | %.1e | %.0e | %s |\n", name, NR, first, last, worst, most, right ? "right" : "**WRONG**"
            exit !right
        }' || failed=1
}
heads() { say "| run | steps | loss | largest difference | allowed | |"; say "|---|---|---|---|---|---|"; }
# number KEY FILE: of what was predicted.
number() { sed -n 's/.*"predicted":{//p' "$2" | sed 's/"search":.*//' | sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p"; }

card=$(nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader 2> /dev/null | head -n 1)
say "# dplan on a GPU"
say
say "$(date -u +%Y-%m-%d), \`$("$dplan" --version)\`, ${card:-no nvidia-smi}. Printed by \`tests/gpu.sh\`."
say
cluster=${DPLAN_GPU_CLUSTER:-$(case $card in *H200*) say h200:1 ;; *B200*) say b200:1 ;; *A100*80*) say a100-80g:1 ;; *A100*) say a100-40g:1 ;; *) say h100:1 ;; esac)}

if wants kernels; then
    say "## Kernels"; say
    limit 150 "$dplan" kernels --check --cases "$cases"
    say
fi

# beside NAME TOLERANCE PLAN: trains a plan on CPU ranks and on the GPU.
beside() {
    limit 60 "$dplan" run "$3" --steps 6 --lr 0.003 --json > "$work/cpu" || return
    limit 60 "$dplan" run "$3" --steps 6 --lr 0.003 --json --device cuda --scratch "$work" > "$work/cuda" || return
    losses "$work/cpu" > "$work/cpu.losses"; losses "$work/cuda" > "$work/cuda.losses"
    near "$1" "$2" "$work/cuda.losses" "$work/cpu.losses"
}
# plan MODEL PRECISION PINS: of a bundled model, for one rank.
plan() { limit 30 "$dplan" compile "$examples/$1" --cluster cpu:1 --batch 8 --precision "$2" --pin "$3" -o "$work/plan.json" > /dev/null; }

if wants train; then
    say "## Bundled models, beside CPU ranks"; say
    heads
    for model in llama-1m/config.json experts.json two-branch.json; do
        plan "$model" f32 micro=4 && beside "$model, f32" 2e-4 "$work/plan.json"
        plan "$model" bf16 micro=4 && beside "$model, bf16" 5e-2 "$work/plan.json"
    done
    say
fi
if wants offload; then
    say "## States elsewhere, beside CPU ranks"; say
    heads
    for way in optimizer parameters parameters:nvme; do
        plan two-branch.json f32 "micro=4,offload=$way" && beside "two-branch.json, offload=$way" 2e-4 "$work/plan.json"
    done
    say
fi
if wants oracles && [ -n "${DPLAN_GPU_ORACLES:-}" ]; then
    say "## Reference runs"; say
    heads
    for oracle in "$DPLAN_GPU_ORACLES"/*/; do
        of() { tr -d ' \n' < "$oracle/expected.json" | sed -n "s/.*\"$1\":\([-0-9.e+]*\).*/\1/p"; }
        limit 30 "$dplan" compile "$oracle/config.json" --cluster cpu:1 --batch "$(of batch)" --seq "$(of seq)" --precision f32 -o "$work/plan.json" > /dev/null || continue
        limit 90 "$dplan" run "$work/plan.json" --device cuda --steps "$(of steps)" --lr "$(of lr)" --eps "$(of eps)" --weight-decay "$(of weight_decay)" \
            --data "$oracle/tokens.json" --init "$oracle/weights.safetensors" --json > "$work/cuda" || continue
        losses "$work/cuda" > "$work/cuda.losses"
        tr -d ' \n' < "$oracle/expected.json" | sed 's/.*"loss_per_step":\[\([^]]*\)\].*/\1/' | tr ',' '\n' > "$work/right"
        say >> "$work/right"
        near "$(basename "$oracle")" 1e-3 "$work/cuda.losses" "$work/right"
    done
    say
fi

if wants time || wants step; then
    model=${DPLAN_GPU_MODEL:-$work/config.json}
    cat > "$work/config.json" <<'CONFIG'
{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
 "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": false}
CONFIG
    # shellcheck disable=SC2086
    limit 60 "$dplan" compile "$model" --cluster "$cluster" ${DPLAN_GPU_SHAPE:---seq 2048 --batch 8} --precision bf16 -o "$work/large.json" --json > "$work/large" || exit 1
fi
if wants time; then
    say "## Bandwidth and arithmetic"; say
    limit 150 "$dplan" kernels "$work/large.json" --time
    say
fi
if wants step; then
    say "## A step of a larger model"; say
    limit 150 "$dplan" run "$work/large.json" --device cuda --steps 8 --json > "$work/run" && {
        # Half of the steps, from the fourth on: the first ones compile, and capture.
        sed -n 's/.*"seconds":\([0-9.e+-]*\).*"step":.*"tokens_per_second":\([0-9.e+-]*\).*/\1 \2/p' "$work/run" | tail -n +4 | sort -g |
            awk '{ s[NR] = $1; t[NR] = $2 } END { print s[int((NR + 1) / 2)], t[int((NR + 1) / 2)] }' > "$work/median"
        read -r seconds tokens < "$work/median"
        say "| | predicted for $cluster | measured |"; say "|---|---|---|"
        step=$(number step_seconds "$work/large"); mfu=$(number mfu "$work/large")
        awk -v p="$step" -v s="$seconds" -v m="$mfu" -v t="$tokens" 'BEGIN {
            printf "| step, ms | %.1f | %.1f |\n| tokens/s | %.0f | %.0f |\n| MFU | %.1f %% | %.1f %% |\n", p * 1e3, s * 1e3, t * s / p, t, m * 100, m * p / s * 100 }'
        say
    }
    limit 150 "$dplan" run "$work/large.json" --device cuda --steps 3 --json --profile "$work/profile.json" > /dev/null && {
        say "The profile of 3 steps, launched call by call, beside the plan:"; say; say '```'
        limit 60 "$dplan" compare "$work/large.json" "$work/profile.json"
        say '```'; say
    }
fi

[ $failed -eq 0 ] && say "Every check is right." || say "**A check failed.**"
exit $failed
