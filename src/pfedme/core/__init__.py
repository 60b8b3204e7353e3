"""The mathematics: parameters, a client's problem, the proximal step, models."""
