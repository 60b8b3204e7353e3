#!/usr/bin/env bash
# A federation on several machines.
#
# A server and two clients, here on one machine and with trial keys. On separate machines, each client creates its own
# key; see docs/deploy.md. It needs Flower (`pip install 'pfedme[flower]'`), two tables `east.csv` and `west.csv` with
# the same columns and at least a hundred rows each, and about a minute.
set -euo pipefail
trap 'kill $(jobs -p) 2> /dev/null || true' EXIT # if a client ends early, so does the server

pfedme keys --server localhost --clients east west -o trial

pfedme server --algorithm pfedme --lam 5 --eta 0.05 --rounds 3 --cohort 2 --min-clients 2 --keys trial \
    --listen 127.0.0.1:9092 --out runs/trial &
started=($!)

for name in east west; do
    pfedme client --server localhost:9092 --data "$name.csv" --label outcome --keys "trial/clients/$name" \
        --state "$name" --approve any &
    started=($! "${started[@]}")
done
for process in "${started[@]}"; do wait "$process"; done

# Each client's own model is where its rows are.
pfedme predict east/model --data east.csv -o east-predictions.csv
