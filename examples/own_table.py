"""Your own table, from a DataFrame.

`client` is the column that names the client of each row, `label` the one to predict. Both polars and pandas
frames work; `path=` takes a file instead.
"""

import numpy as np
import polars as pl

import pfedme

rng = np.random.default_rng(0)
rows = 240
age = rng.integers(20, 90, rows)
ward = rng.choice(["surgery", "medicine"], rows)
ill = age + 10 * (ward == "surgery") + rng.normal(0, 15, rows) > 60
frame = pl.DataFrame(
    {
        "hospital": rng.choice(["Akron", "Dayton", "Toledo"], rows),
        "age": age,
        "ward": ward,
        "outcome": np.where(ill, "ill", "well"),
    }
)

patients = pfedme.Table(frame=frame, client="hospital", label="outcome")
federation = patients.load()
print(federation.names, federation.n_train, federation.n_test)

result = pfedme.train("fedavg", patients, rounds=10)
print(result.record["final"]["global"]["accuracy"])
