"""The finished run that is audited: its simulation, and the models that it left."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from pfedme import __version__
from pfedme.core.tree import Params
from pfedme.engine.exchange import first_model
from pfedme.engine.simulate import Simulation
from pfedme.errors import InputError
from pfedme.privacy.units import Rows
from pfedme.runs.folder import Folder, read_models
from pfedme.runs.run import Run


@dataclasses.dataclass(frozen=True)
class Subject:
    """A finished run with its models."""

    run: Run
    simulation: Simulation
    w: Params | None
    """The global model; None if there is none."""
    theta: Params | None
    """The personal models, stacked; None if there are none."""
    who: np.ndarray
    """The clients that the personal models belong to."""

    @classmethod
    def open(cls, path: Path) -> Subject:
        """The run in a folder; its data is loaded again."""
        folder = Folder(path)
        record = folder.read()
        if record.get("deployed"):
            raise InputError(
                f"{path} holds a run with clients on their own machines, whose rows are not here; audit a "
                "simulation with the same settings."
            )
        if (status := record.get("status")) != "finished":
            cure = f"'pfedme resume {path}' continues it" if status == "running" else "start another"
            raise InputError(f"The run in {path} has not finished ({status}); {cure}.")
        if record.get("version") != __version__:
            raise InputError(
                f"{path} was trained with pfedme {record.get('version')}, but this is {__version__}, which "
                "may train differently; audit it with the version that trained it."
            )
        try:
            run = Run.from_json(record["config"])
        except (KeyError, TypeError) as error:
            raise InputError(f"{folder.record} is damaged: {error}; start the run again.") from None
        if run.privacy is not None and not isinstance(run.privacy, Rows):
            raise InputError(
                f"{path} claims privacy of {run.privacy.name}, and an audit looks for single rows, which are "
                "not what it protects; audit a run that claims privacy of rows, or none."
            )
        run, simulation = run.prepare()
        tensors, about = read_models(folder.model)
        like = first_model(simulation.model, simulation.seed)
        size = like.ravel().size
        for name, values in tensors.items():
            if values.shape[-1] != size:
                raise InputError(
                    f"{folder.model} does not fit the run: {name} has {values.shape[-1]} numbers for each "
                    f"model, not {size}; start the run again."
                )
        known = {int(id): i for i, id in enumerate(simulation.federation.ids)}
        try:
            who = np.array([known[id] for id in about["clients"]], int)
        except (KeyError, TypeError):
            raise InputError(
                f"{folder.model} names clients that the run's data does not have; start the run again."
            ) from None
        w, theta = (like.like(jnp.asarray(tensors[k])) if k in tensors else None for k in ("w", "theta"))
        return cls(run, simulation, w, theta, who if theta is not None else np.zeros(0, int))
