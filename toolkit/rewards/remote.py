"""Scores from an HTTP server.

A POST for each batch, `{"prompts": […], "responses": […], "columns": {name: […]}}`, is answered with
`{"scores": […]}`, one finite number a response in their order.
"""

import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, OpenerDirector, Request, build_opener

from toolkit.data import Rollout, select
from toolkit.errors import RewardError

_LONGEST_WAIT = 60.0


class _NoRedirects(HTTPRedirectHandler):
    """A redirected POST becomes a GET, and would take the token to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass
class RemoteReward:
    """Scores responses by asking a server, one batch after another.

    A try that fails by a lost connection, the time-out, or status 429 or 5xx is repeated after `first_wait` seconds,
    then after twice as long each time, or as long as the server asks for by `Retry-After`; a minute at most. Any other
    answer that is no success ends the run at once. Redirects are not followed. Proxies are those of the environment.

    Args:
        url: http:// or https://.
        batch_size: responses a request.
        timeout: seconds in which the server may be silent.
        retries: tries of a request after the first.
        token_variable: name of the environment variable that holds a bearer token. The token stands nowhere else.
        first_wait: seconds before the first of the retries.

    Raises:
        RewardError: the environment has no such variable.
    """

    url: str
    batch_size: int = 16
    timeout: float = 30.0
    retries: int = 5
    token_variable: str | None = None
    first_wait: float = 1.0
    _opener: OpenerDirector = field(init=False, repr=False)
    _headers: dict[str, str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._opener = build_opener(_NoRedirects)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.token_variable is not None:
            self._headers["Authorization"] = f"Bearer {read_token(self.token_variable)}"

    def __call__(self, rollout: Rollout) -> list[float]:
        """B scores.

        Raises:
            RewardError: the server stayed away, refused, or gave no such answer; or a column cannot be sent.
        """
        scores: list[float] = []
        for start in range(0, len(rollout), self.batch_size):
            part = select(rollout, range(start, min(start + self.batch_size, len(rollout))))
            scores += self._scores(self._ask(_body(part)), part)
        return scores

    def _ask(self, body: bytes) -> bytes:
        started, wait = time.monotonic(), self.first_wait
        for tries_left in range(self.retries, -1, -1):
            asked_for = None
            try:
                request = Request(self.url, data=body, headers=self._headers, method="POST")
                with self._opener.open(request, timeout=self.timeout) as answer:
                    return answer.read()
            except HTTPError as error:
                reason = f"status {error.code} {error.reason}{_excerpt(_read(error))}"
                if error.code != 429 and error.code < 500:
                    raise RewardError(
                        f"scorer.url: {self.url} refused a request: {reason}. "
                        "Mend the address, the token or the server."
                    ) from error
                asked_for = _seconds(error.headers.get("Retry-After"))
            except (OSError, HTTPException) as error:
                cause = error.reason if isinstance(error, URLError) else error
                reason = f"nothing for {self.timeout:g} s" if isinstance(cause, TimeoutError) else _described(cause)
            if tries_left:
                time.sleep(min(_LONGEST_WAIT, asked_for if asked_for is not None else wait))
                wait *= 2
        seconds = time.monotonic() - started
        raise RewardError(
            f"scorer.url: {self.url} gave no answer in {self.retries + 1} tries over {seconds:.0f} s; "
            f"the last: {reason}. See to the server, then go on from the last checkpoint with RESUME=1 (--resume)."
        )

    def _scores(self, answer: bytes, part: Rollout) -> list[float]:
        wanted = f'{{"scores": [{len(part)} numbers]}} is needed'
        try:
            values = json.loads(answer)
        except ValueError as error:
            raise RewardError(
                f"scorer.url: {self.url} did not answer with JSON{_excerpt(answer)}; {wanted}."
            ) from error
        scores = values.get("scores") if isinstance(values, dict) else None
        if not isinstance(scores, list):
            raise RewardError(f"scorer.url: {self.url} answered without scores{_excerpt(answer)}; {wanted}.")
        if len(scores) != len(part):
            raise RewardError(
                f"scorer.url: {self.url} answered with {len(scores)} scores for {len(part)} responses; {wanted}."
            )
        for row, score in enumerate(scores):
            if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
                raise RewardError(
                    f"scorer.url: {self.url} gave {score!r} to the response {part.responses[row]!r}; scores are finite "
                    "numbers."
                )
        return [float(score) for score in scores]


def read_token(variable: str) -> str:
    """A bearer token from the environment.

    Raises:
        RewardError: it is not there, or cannot be sent. The message does not show it.
    """
    token = os.environ.get(variable, "").strip()
    if not token:
        raise RewardError(
            f"scorer.token_variable: the environment has no variable {variable}. Set it to the server's token."
        )
    if not (token.isascii() and token.isprintable()):
        raise RewardError(
            f"scorer.token_variable: {variable} holds signs that no token has, such as a line break. Set it anew."
        )
    return token


def _body(part: Rollout) -> bytes:
    columns = {name: list(values) for name, values in part.columns.items()}
    message = {"prompts": list(part.prompts), "responses": list(part.responses), "columns": columns}
    try:
        return json.dumps(message, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        unfit = next((name for name, values in columns.items() if not _fits_json(values)), "prompts")
        raise RewardError(
            f'the column "{unfit}" of the prompts cannot be sent as JSON ({error}). Remove it from the data, or make '
            "text or numbers of it."
        ) from error


def _fits_json(values: Sequence[Any]) -> bool:
    try:
        json.dumps(values, allow_nan=False)
    except (TypeError, ValueError):
        return False
    return True


def _read(error: HTTPError) -> bytes:
    try:
        return error.read(300)
    except (OSError, HTTPException):
        return b""


def _excerpt(answer: bytes) -> str:
    text = " ".join(answer[:200].decode("utf-8", "replace").split())
    return f" ({text!r})" if text else ""


def _described(cause: Any) -> str:
    return f"{type(cause).__name__}: {cause}" if isinstance(cause, Exception) else str(cause)


def _seconds(header: str | None) -> float | None:
    """`Retry-After` in seconds; its other form, a date, is passed over."""
    return float(header) if header is not None and header.isdecimal() else None
