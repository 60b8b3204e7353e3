"""From a run to a model in use.

An exported model is a folder with the parameters and everything needed to use them: columns, categories,
scaling and labels. `pfedme export` and `pfedme predict` do the same on the command line.
"""

import polars as pl

import pfedme

frame = pl.DataFrame(
    {
        "shop": ["north", "south"] * 40,
        "price": [1.0 + k % 7 for k in range(80)],
        "season": ["summer", "summer", "winter", "winter"] * 20,
        "sold": [10.0 - k % 7 + (k % 4 > 1) for k in range(80)],
    }
)
sales = pfedme.Table(frame=frame, client="shop", label="sold", task="regression")
pfedme.train("pfedme:R=5,lam=1", sales, rounds=20, out="runs/sales")

pfedme.model_of("runs/sales", client="north").save("models/north")

new = pl.DataFrame({"price": [2.0, 6.0], "season": ["winter", "summer"]})
print(pfedme.load("models/north").predict(new))
