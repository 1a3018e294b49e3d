"""Processes for the tests, which import the toolkit once for all of them; and several over gloo that each call the same
function.
"""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from typing import Any

SECONDS = 60  # that the slowest call may take


def context() -> BaseContext:
    """Where processes come from: forked from a server that has imported the toolkit, where there is fork."""
    if sys.platform == "win32":
        return multiprocessing.get_context("spawn")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.tiny_runs", "tests.trainers.resumable"])
    return server


def _serve(connection: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    from toolkit import processes

    torch.set_num_threads(1)
    processes.join()
    while (task := connection.recv()) is not None:
        function, arguments = task
        try:
            connection.send((True, function(*arguments)))
        except BaseException as error:
            connection.send((False, "".join(traceback.format_exception(error))))


class Several:
    """N processes, each of which calls what `__call__` is given, at the same time."""

    def __init__(self, number: int):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        made = context()
        self.ends, self.processes = [], []
        for rank in range(number):
            here, there = made.Pipe()
            shared = {"WORLD_SIZE": number, "RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port}
            environment = {name: str(value) for name, value in shared.items()} | {"MASTER_ADDR": "127.0.0.1"}
            process: Any = made.Process(target=_serve, args=(there, environment), daemon=True)
            process.start()
            self.ends.append(here)
            self.processes.append(process)

    def answers(self, function: Callable[..., Any], *arguments: Any) -> list[tuple[bool, Any]]:
        """By rank, whether the call came to an end, and what it gave, or the text of its error."""
        for end in self.ends:
            end.send((function, arguments))
        assert all(end.poll(SECONDS) for end in self.ends), "a process hangs"
        return [end.recv() for end in self.ends]

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the call gave in each process."""
        answers = self.answers(function, *arguments)
        for whole, answer in answers:
            assert whole, answer
        return [answer for _, answer in answers]

    def close(self) -> None:
        for end, process in zip(self.ends, self.processes, strict=True):
            if process.is_alive():
                end.send(None)
            process.join(10)
            process.kill()
