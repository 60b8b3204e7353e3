"""A report as one HTML file.

Every run with a folder has a self-contained `report.html`, which opens in any browser. `report` puts several
runs and comparisons on one page, like `pfedme report`.
"""

from pathlib import Path

import pfedme
from pfedme.report.html.page import report

data = "synthetic:clients=6,rows=60,features=5,classes=3"
pfedme.train("pfedme:R=5", data, rounds=5, eval_every=1, out="runs/pfedme")
pfedme.train("fedavg:R=5", data, rounds=5, eval_every=1, out="runs/fedavg")
print("runs/pfedme has", *sorted(path.name for path in Path("runs/pfedme").iterdir()))

page = Path("both.html")
report([Path("runs/pfedme"), Path("runs/fedavg")], page)
print(f"{page} has {page.stat().st_size // 1024} KiB")
