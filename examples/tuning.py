"""Search for settings on validation rows.

Settings that are given (`R=5`) are fixed, and the others are searched. Test rows are not used until the run
with the best settings is evaluated. Tuning needs Optuna: `pip install 'pfedme[tune]'`.
"""

import pfedme

data = "synthetic:clients=6,rows=60,features=5,classes=3"
tuning = pfedme.tune("pfedme:R=5,K=2", data, trials=4, rounds=5)

for trial in tuning.trials:
    print(trial.number, trial.settings, trial.accuracy)
print("best:", tuning.best[0].settings)

result = pfedme.train(tuning.run.algorithm, data, rounds=5)
print(result.record["final"]["personal"]["accuracy"])
