#!/usr/bin/env bash
# Installs the wheel of dist/ where nothing else is, without constraints.txt, and uses it.
set -euo pipefail
cd "$(dirname "$0")/.."
wheels=(dist/pfedme-*.whl)
wheel=$PWD/${wheels[-1]}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"${PYTHON:-python3}" -m venv "$place/venv"
cd "$place" # where the clone cannot be imported from
export PATH="$place/venv/bin:$PATH"

pip install --quiet --no-compile "$wheel"
pfedme --version
pfedme run fedavg --data synthetic:clients=4,rows=30 --rounds 2 --out first
test -s first/report.html
test -s first/model.safetensors

pip install --quiet --no-compile "$wheel[flower]"
pfedme server --help > help.txt
grep -q -- --min-clients help.txt
echo "The wheel works by itself, and with Flower."
