#!/usr/bin/env bash
# Passes all checks on a machine that has only cargo and a C compiler: formatting, lints, documentation, tests.
set -euo pipefail
cd "$(dirname "$0")"
export CARGO_TERM_COLOR=never
step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --quiet -- -D warnings
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" step cargo doc --workspace --no-deps --document-private-items --quiet

# NVRTC compiles the generated kernels with no GPU; without it, or without python3, those tests say so and pass.
if [ -z "${DPLAN_NVRTC:-}" ] && command -v python3 > /dev/null; then
    site=target/nvrtc
    library() { find "$PWD/$site" -name 'libnvrtc.so.1*' ! -name '*alt*' 2> /dev/null | head -n 1; }
    [ -n "$(library)" ] || timeout 120 python3 -m pip install --quiet --disable-pip-version-check --target "$site" nvidia-cuda-nvrtc-cu12 > /dev/null 2>&1 || true
    found=$(library)
    if [ -n "$found" ]; then export DPLAN_NVRTC="$found"; fi
fi
step cargo test --workspace --no-fail-fast --quiet
