"""Functions that give or raise something odd and disturb the process; servers that answer something odd."""

import contextlib
import json
import math
import os
import random
import socket
import threading
from typing import Any

import numpy as np
import torch

from tests.fuzz.cases import Case, Place, damaged, mutated, refusal
from toolkit.data import Rollout
from toolkit.rewards import RemoteReward, score_with

_GOOD: list[Any] = [
    [1.0, 2.0], [1, 2], (1, 2), torch.tensor([1.0, 2.0]), np.array([1.0, 2.0]), torch.tensor([1.0, 2.0]).half(),
    torch.tensor([1, 2]), torch.tensor([1.0, 2.0], requires_grad=True),
]  # fmt: skip
_NOT: list[Any] = [
    None, 1.0, [], [1.0], [1.0, 2.0, 3.0], [[1.0], [2.0]], [[1.0], 2.0], ["1", "2"], "12", b"12", {"a": 1, "b": 2},
    {1.0, 2.0}, [None, 1.0], [math.nan, 1.0], [math.inf, 1.0], [10**400, 1], [1e300, 1.0], [1j, 1], object(), print,
    [object()] * 2, (x for x in (1.0, 2.0)), torch.tensor([1j, 2]), torch.zeros(2, 1), torch.ones(2).to_sparse(),
    torch.empty(2, device="meta"), np.ma.masked_array([1.0, 2.0], [0, 1]), np.array(["a", "b"]),
    np.array([None, 1], dtype=object), np.array(["2026-11-22"] * 2, dtype="datetime64[D]"),
]  # fmt: skip


class _Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


_RAISED: list[BaseException] = [
    ValueError("a\x1b[31mb"), KeyError("x"), SystemExit(3), StopIteration(), RecursionError(), MemoryError(),
    AssertionError(), _Speechless(), ExceptionGroup("g", [ValueError("x")]), OSError(28, "full"), GeneratorExit(),
    UnicodeDecodeError("utf-8", b"x", 0, 1, "y"), StopAsyncIteration(), torch.OutOfMemoryError("x"),
    Exception("long " * 9999),
]  # fmt: skip
_DISTURBS: list[Any] = [
    lambda rollout: None, lambda rollout: rollout.responses.clear(), lambda rollout: rollout.columns.update(n=[]),
    lambda rollout: torch.manual_seed(3), lambda rollout: random.seed(3), lambda rollout: os.chdir("/"),
    lambda rollout: torch.set_default_dtype(torch.float64),
]  # fmt: skip


def reward_case(place: Place, draw: random.Random) -> Case:
    return _function(draw) if draw.random() < 0.5 else _server(draw)


def _function(draw: random.Random) -> Case:
    kind, disturb = draw.choice(["good", "not", "not", "raises"]), draw.choice(_DISTURBS)
    given = draw.choice({"good": _GOOD, "not": _NOT, "raises": _RAISED}[kind])
    asked, got = _rollout(), []

    def reward(rollout: Rollout) -> Any:
        disturb(rollout)
        if kind == "raises":
            raise given
        return given

    async def later(rollout: Rollout) -> Any:
        return reward(rollout)

    function = draw.choice([reward, later])
    before = _process()

    def check() -> str:
        traces = "" if _process() == before and asked == _rollout() else "it left its traces; "
        return traces + ("" if kind != "good" or got == [[1.0, 2.0]] else f"scores {got}")

    what = f"{function.__name__} {kind} {type(given).__name__} {given if kind != 'raises' else ''}"[:300]
    must = "fine" if kind == "good" else "refused"
    return Case(
        what, lambda: refusal(lambda: got.append(score_with(function, asked).tolist())), ("reward",), must, check
    )


def _rollout() -> Rollout:
    return Rollout(["a", "b"], ["x y", "yes!"], [[5], [6]], [[7, 8, 2], [9, 2]], [True, True], {"n": [1, 2]})


def _process() -> tuple[Any, ...]:
    return os.getcwd(), torch.get_default_dtype(), torch.get_rng_state().tolist(), random.getstate()


_HEADERS = [
    "", "", "X: y\r\n" * 200, "Content-Type: text/html\r\n", "Content-Encoding: gzip\r\n", "X: \x1b[31m\r\n",
    "bogus\r\n", "Transfer-Encoding: chunked\r\n", "Content-Length: 99999\r\n", "Content-Length: -1\r\n",
    "Retry-After: 1e99\r\n",
]  # fmt: skip
_FINE_HEADERS = _HEADERS[:4]
_STATUS = ["200 OK"] * 6 + ["204 No", "301 Moved", "404 \x1b[31mNo", "500 Oh", "999 ?", "abc", "100 Continue"]


def _server(draw: random.Random) -> Case:
    way, header, status = draw.choice(["body", "raw", "http"]), draw.choice(_HEADERS), draw.choice(_STATUS)
    value = mutated(draw, {"scores": [1.0, 2.0]})[0] if way == "body" else {"scores": [1.0, 2.0]}
    body = json.dumps(value, default=str)
    if way == "body":
        header, status = "", "200 OK"
    length = "" if "Length" in header or "chunked" in header else f"Content-Length: {len(body.encode())}\r\n"
    raw = f"HTTP/1.1 {status}\r\n{header}{length}\r\n{body}".encode()
    raw = damaged(draw, raw) if way == "raw" else raw
    listener, got = socket.create_server(("127.0.0.1", 0)), []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(2)
                    connection.recv(2**16)
                    connection.sendall(raw)

    threading.Thread(target=serve, daemon=True).start()

    def ask() -> None:
        remote = RemoteReward(f"http://127.0.0.1:{listener.getsockname()[1]}/", timeout=1, retries=1, first_wait=0.01)
        got.append(score_with(remote, _rollout()).tolist())

    def check() -> str:
        listener.close()
        if not got or way == "raw":
            return ""
        said = value.get("scores") if isinstance(value, dict) else None
        right = isinstance(said, list) and np.array_equal(np.float32(said), np.float32(got[0]))
        return "" if right else f"scores {got[0]} of {body}"

    must = "fine" if way == "http" and status == "200 OK" and header in _FINE_HEADERS else ""
    return Case(f"server {raw[:300]!r}", lambda: refusal(ask), ("127.0.0.1",), must, check)
