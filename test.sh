#!/usr/bin/env bash
# Passes all checks on a machine that has only cargo and a C compiler: formatting, lints, documentation, tests.
set -euo pipefail
cd "$(dirname "$0")"
export CARGO_TERM_COLOR=never
step() { printf '\n== %s\n' "$*"; "$@"; }

step cargo fmt --all --check
step cargo clippy --workspace --all-targets --quiet -- -D warnings
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" step cargo doc --workspace --no-deps --document-private-items --quiet
step cargo test --workspace --no-fail-fast --quiet
