"""Flower's simulation with Ray: seconds per round of its FedAvg, written as JSON.

The server looks for replies every 0.1 s unless told otherwise, so it is also run with 0.005 s.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

from common import R, Task, per_round, read_task, write_seconds
from flower_client import TASK, app, model
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

POLLING = {"FedAvg": 0.1, "FedAvg, polling 0.005 s": 0.005}


class Timed(FedAvg):
    """FedAvg that notes when each round ended, and checks that every client replied with R steps."""

    def __init__(self, trains: int, clients: int) -> None:
        super().__init__(
            fraction_train=trains / clients,
            fraction_evaluate=0.0,
            min_train_nodes=trains,
            min_available_nodes=clients,
        )
        self.trains = trains
        self.ends: list[float] = []

    def aggregate_train(self, server_round: int, replies: Iterable[Message]):
        """Called by Flower at the end of a round."""
        replies = list(replies)
        steps = [reply.content["metrics"]["steps"] for reply in replies if reply.has_content()]
        assert steps == [R] * self.trains, f"replies with {steps} steps instead of {self.trains} with {R}"
        aggregate = super().aggregate_train(server_round, replies)
        self.ends.append(time.perf_counter())
        return aggregate


def measure(task: Task, grid: Grid, who: str) -> float:
    """Seconds per round."""
    strategy = Timed(task.trains[who], task.clients)
    strategy.start(grid, ArrayRecord(model().state_dict()), num_rounds=1 + task.rounds[who])
    return per_round(strategy.ends)


def main() -> None:
    """Measures FedAvg, with everyone training and with the cohort."""
    os.environ[TASK] = sys.argv[1]
    task = read_task(sys.argv[1])
    server = ServerApp()

    @server.main()
    def serve(grid: Grid, context: Context) -> None:
        seconds = {}
        for name, interval in POLLING.items():
            grid.pull_interval = interval
            seconds[name] = {who: measure(task, grid, who) for who in task.trains}
        write_seconds(seconds)

    run_simulation(server, app, task.clients, backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    main()
