"""Does joining pay? Compare methods and read the verdict.

Twelve sites have few rows each and similar patients, so joining should pay here. The more the sites differ,
the less it does.
"""

import numpy as np
import polars as pl

import pfedme

rng = np.random.default_rng(0)
x = rng.normal(size=(600, 8))
ill = x @ rng.normal(size=8) + 2 * rng.normal(size=600) > 0
columns = {f"test {k}": x[:, k] for k in range(8)} | {"ill": np.where(ill, "yes", "no")}
frame = pl.DataFrame({"site": rng.integers(12, size=600), **columns})
patients = pfedme.Table(frame=frame, client="site", label="ill", train=0.5)

compared = pfedme.compare(["fedavg:R=5,B=0", "alone:R=5,B=0"], patients, budget=100)
print(compared)  # the methods side by side
verdict = compared.verdict
assert verdict is not None
print(verdict["verdict"])  # yes, no or cannot tell
print(verdict["sentence"])  # with the gain and its interval
