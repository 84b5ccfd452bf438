#!/usr/bin/env bash
# CPU ranks beside PyTorch DDP on the same model and machine, three rounds of each in turn. Makes a throw-away environment with torch and transformers (about 6 GB),
# unless DPLAN_PYTHON names a Python that has them.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${DPLAN_PYTHON:-}
if [ -z "$python" ]; then
    environment=$(mktemp -d)
    trap 'rm -rf "$environment"' EXIT
    python3 -m venv "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check --no-cache-dir torch transformers
    python=$environment/bin/python
fi
cargo bench --quiet --bench speed --no-run
for round in 1 2 3; do
    echo "round $round"
    "$python" benches/pytorch/ddp.py
    cargo bench --quiet --bench speed
done
