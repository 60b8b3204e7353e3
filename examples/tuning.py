"""Search for settings by validation rows.

What is given (`R=5`) is fixed, the rest is searched. Test rows are not looked at until the run with the
best settings is judged. Tuning needs Optuna: `pip install 'pfedme[tune]'`.
"""

import pfedme

data = "synthetic:clients=6,rows=60,features=5,classes=3"
tuning = pfedme.tune("pfedme:R=5,K=2", data, trials=4, rounds=5)

for trial in tuning.trials:
    print(trial.number, trial.settings, trial.accuracy)
print("best:", tuning.best[0].settings)

result = pfedme.train(tuning.run.algorithm, data, rounds=5)
print(result.record["final"]["personal"]["accuracy"])
