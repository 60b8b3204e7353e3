"""The server's control of its SuperLink: which clients may take part, and the run."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import ListRunsRequest, RegisterNodeRequest, StartRunRequest, StreamLogsRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from pfedme.deploy.flower import program
from pfedme.errors import RunError


class Status(NamedTuple):
    """The status of the run, according to Flower."""

    over: bool
    well: bool
    details: str


class ControlClient:
    """A client for the control API of a SuperLink on this machine."""

    def __init__(self, address: str, ca: Path | None) -> None:
        self.http = ControlHttpClient.from_server_address(
            address, ca is None, str(ca) if ca else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="pfedme server")],
        )  # fmt: skip

    def register(self, keys: Mapping[str, Path]) -> dict[int, str]:
        """Admits clients with these public keys; returns the names of their nodes."""
        names = {}
        for name, path in keys.items():
            key: Any = load_ssh_public_key(path.read_bytes())
            request = RegisterNodeRequest(public_key=public_key_to_bytes(key))
            names[self._asked(lambda r=request: self.http.RegisterNode(r)).node_id] = name
        return names

    def submit(self, config: Mapping[str, Any]) -> int:
        """Starts the run that a configuration describes; returns its number."""
        content = program()
        request = StartRunRequest(
            fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {})),
            override_config=user_config_to_proto(dict(config)),
        )
        return self._asked(lambda: self.http.StartRun(request)).run_id

    def status(self, run: int) -> Status:
        """The status of a run."""
        listed = self._asked(lambda: self.http.ListRuns(ListRunsRequest(run_id=run)))
        status = listed.run_dict[run].status
        return Status(status.status == "finished", status.sub_status == "completed", status.details)

    def words(self, run: int) -> str:
        """The output of a run's server app so far."""
        request = StreamLogsRequest(run_id=run, after_timestamp=0.0)
        return self._asked(lambda: next(iter(self.http.StreamLogs(request)))).log_output

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except httpx.HTTPStatusError as error:
            raise RunError(f"Flower's SuperLink refused a request: {error.response.text[:300]}") from None
        except httpx.HTTPError as error:
            raise RunError(f"Flower's SuperLink does not answer ({error}).") from None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()
