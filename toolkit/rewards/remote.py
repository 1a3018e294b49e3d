"""Scores from an HTTP server.

A POST for each batch, `{"prompts": […], "responses": […], "columns": {name: […]}}`, is answered with
`{"scores": […]}`, one finite number a response in their order.
"""

import asyncio
import json
import math
import os
import re
import reprlib
import time
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from toolkit.data import Rollout, select
from toolkit.errors import NotFiniteError, Problem, RewardError, printable
from toolkit.rewards.base import Reward, wait_for
from toolkit.rewards.dense import LARGEST_SCORE, quoted
from toolkit.rewards.scorer import Prompts, Scorer, ScorerContext, problems_of
from toolkit.settings import AT_LEAST_1, NOT_NEGATIVE, Range, setting

if TYPE_CHECKING:  # whoever asks no server need not have them: a machine that is lent for benchmarks does not
    import httpx2
    import tenacity

_SECONDS = Range("positive and finite", lambda x: 0 < x < math.inf)
_LONGEST_WAIT = 60.0  # seconds
_LARGEST_BODY = 2**24  # bytes: a batch of a million scores


@dataclass
class RemoteScorer(Scorer):
    """An HTTP server, asked by POST."""

    kind: ClassVar[str] = "remote"
    url: str = setting(MISSING, "where batches are sent by POST: http:// or https://.")
    batch_size: int = setting(16, "responses per request.", AT_LEAST_1)
    timeout: float = setting(30.0, "seconds for one try, from its start to the last byte of the answer.", _SECONDS)
    retries: int = setting(5, "tries of a request after the first, each after a wait twice as long.", NOT_NEGATIVE)
    deadline: float | None = setting(None, "seconds for a batch with all its tries; null for no limit.", _SECONDS)
    token_variable: str | None = setting(None, "name of the environment variable that holds a bearer token.")

    def conflicts(self) -> Iterator[Problem]:
        yield from _url_problems(self.url)
        if not re.fullmatch(r"[A-Za-z_]\w*", self.token_variable or "x", re.ASCII):
            # It may be the token itself, which must not be shown.
            yield Problem("the name of an environment variable is needed: letters, digits and _.", "token_variable")

    def check(self, context: ScorerContext) -> list[Problem]:
        problems = [] if self.token_variable is None else problems_of(read_token, self.token_variable)
        return problems + (context.problems_of_prompts(_check_sent) if context.reads_rows else [])

    def build(self, context: ScorerContext) -> Reward:
        return RemoteReward(**vars(self))


class _Passing(Exception):
    """A failure after which another try may succeed, in words, and the seconds to wait that the server asks for."""

    def __init__(self, reason: str, retry_after: float | None = None):
        super().__init__(reason)
        self.retry_after = retry_after


@dataclass
class RemoteReward(RemoteScorer):
    """Scores responses by asking a server, one batch after another.

    A try that fails by a lost connection, the time-out, or status 429 or 5xx is repeated after `first_wait` seconds,
    then after twice as long each time, or as long as the server asks for by `Retry-After`; a minute at most. Any other
    answer that is no success ends the run at once. Redirects are not followed. Proxies are those of the environment.
    Raises: RewardError: the environment has no such variable.
    """

    first_wait: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers["Accept-Encoding"] = "identity"  # a few bytes of any other may stand for gigabytes
        if self.token_variable is not None:
            self._headers["Authorization"] = f"Bearer {read_token(self.token_variable)}"

    def __call__(self, rollout: Rollout) -> list[float]:
        """B scores. Raises: RewardError: no server, a refusal, no such answer, or a column that cannot be sent."""
        return wait_for(self._ask_all(rollout), loop="remote rewards")

    async def _ask_all(self, rollout: Rollout) -> list[float]:
        import httpx2

        scores: list[float] = []
        # Its own time-outs start anew with each byte.
        async with httpx2.AsyncClient(headers=self._headers, timeout=None, follow_redirects=False) as client:
            for start in range(0, len(rollout), self.batch_size):
                part = select(rollout, range(start, min(start + self.batch_size, len(rollout))))
                scores += self._scores(await self._ask(client, _body(part)), part)
        return scores

    async def _ask(self, client: "httpx2.AsyncClient", body: bytes) -> bytes:
        import tenacity

        started, limit = time.monotonic(), self.deadline or math.inf
        tries = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.retries + 1) | tenacity.stop_before_delay(limit),
            wait=self._wait,
            before_sleep=self._say_wait,
            retry=tenacity.retry_if_exception_type(_Passing),
            reraise=True,
        )
        try:
            return await tries(self._try, client, body, started + limit)
        except _Passing as error:
            count, seconds = tries.statistics["attempt_number"], time.monotonic() - started
            wrong = f"gave no answer in {count} tries over {seconds:.0f} s; the last: {error}."
            raise self._wrong(wrong, "See to the server.") from error

    def _wait(self, state: "tenacity.RetryCallState") -> float:
        import tenacity

        error = state.outcome.exception() if state.outcome is not None else None
        asked_for = error.retry_after if isinstance(error, _Passing) else None
        return min(_LONGEST_WAIT, tenacity.wait_exponential(self.first_wait)(state) if asked_for is None else asked_for)

    def _say_wait(self, state: "tenacity.RetryCallState") -> None:
        assert state.outcome is not None and state.next_action is not None
        wait = f"waiting {state.next_action.sleep:.2g} s before try {state.attempt_number + 1} of {self.retries + 1}"
        warnings.warn(printable(f"{self._place}: {state.outcome.exception()}; {wait}."), stacklevel=2)

    async def _try(self, client: "httpx2.AsyncClient", body: bytes, until: float) -> bytes:
        import httpx2

        received, seconds = bytearray(), min(self.timeout, until - time.monotonic())
        try:
            async with asyncio.timeout(seconds), client.stream("POST", self.url, content=body) as response:
                async for part in response.aiter_raw():
                    received += part
                    if len(received) > _LARGEST_BODY and not response.is_success:
                        break  # the status says enough
                    if len(received) > _LARGEST_BODY:
                        raise self._wrong(f"gave an answer of more than {_LARGEST_BODY >> 20} MiB.")
        except TimeoutError as error:
            raise _Passing(f"no whole answer in {seconds:.2g} s") from error
        except httpx2.RequestError as error:
            cause = _of_the_system(error) or error
            raise _Passing(f"{type(cause).__name__}: {cause}") from error
        encoding = response.headers.get("Content-Encoding", "identity")
        plain = encoding.lower() == "identity"
        if response.is_success and not plain:
            raise self._wrong(f"answered in {encoding!r}, where plain text was asked for.")
        if response.is_success:
            return bytes(received)
        reason = f"status {response.status_code} {response.reason_phrase}{_excerpt(received) if plain else ''}"
        if response.status_code == 429 or response.is_server_error:
            header = response.headers.get("Retry-After", "")  # its other form, a date, is passed over
            raise _Passing(reason, float(header) if header.isdecimal() else None)
        raise self._wrong(f"refused a request: {reason}.", "Mend the address, the token or the server.")

    def _scores(self, body: bytes, part: Rollout) -> list[float]:
        wanted = f'{{"scores": [{len(part)} numbers]}} is needed.'
        try:
            values = json.loads(body, parse_int=float)  # of 400 digits one is infinite
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"did not answer with JSON{_excerpt(body)}; {wanted}") from error
        scores = values.get("scores") if isinstance(values, dict) else None
        if not isinstance(scores, list):
            raise self._wrong(f"answered without scores{_excerpt(body)}; {wanted}")
        if len(scores) != len(part):
            raise self._wrong(f"answered with {len(scores)} scores for {len(part)} responses; {wanted}")
        for score, response in zip(scores, part.responses, strict=True):
            if not isinstance(score, float) or not abs(score) <= LARGEST_SCORE:
                wrong = f"gave {reprlib.repr(score)} to the response {quoted(response)}; scores are finite float32."
                raise self._wrong(wrong, kind=NotFiniteError if isinstance(score, float) else RewardError)
        return scores

    def _wrong(self, wrong: str, remedy: str = "", *, kind: type[RewardError] = RewardError) -> RewardError:
        return kind(f"{self._place} {wrong}", field="url", remedy=remedy)

    @property
    def _place(self) -> str:
        return _without_query(self.url)


def _without_query(url: str) -> str:
    """An address as messages show it: what follows may be a key."""
    return url.partition("?")[0]


def read_token(token_variable: str) -> str:
    """A token from the environment. Raises: RewardError, which does not show it: it is not there, or cannot be sent."""
    token = os.environ.get(token_variable, "").strip()
    if token and token.isascii() and token.isprintable():
        return token
    wrong = f"{token_variable} holds signs that no token has, such as a line break."
    wrong = wrong if token else f"the environment has no variable {token_variable}."
    raise RewardError(wrong, field="token_variable", remedy="Set it to the server's token.")


def _check_json(name: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        wrong = f'the column "{name}" of the prompts cannot be sent as JSON ({error}).'
        raise RewardError(wrong, remedy="Remove it from the data, or make text or numbers of it.") from error


def _check_sent(prompts: Prompts) -> None:
    """Raises: RewardError: a row has what cannot be sent."""
    for name in prompts.rows.column_names:
        if name != "input_ids":
            prompts.check_each(name, partial(_check_json, name))


def _body(part: Rollout) -> bytes:
    for name, values in part.columns.items():
        _check_json(name, values)
    return json.dumps({"prompts": part.prompts, "responses": part.responses, "columns": part.columns}).encode()


def _of_the_system(error: BaseException | None) -> BaseException | None:
    """The operating system's error under one of httpx, which says less."""
    if isinstance(error, BaseExceptionGroup):  # an address of IPv4 and one of IPv6
        return _of_the_system(error.exceptions[0])
    if error is None or (isinstance(error, OSError) and error.errno):
        return error
    return _of_the_system(error.__cause__ or error.__context__)


def _excerpt(body: bytes | bytearray) -> str:
    text = " ".join(body[:200].decode("utf-8", "replace").split())
    return f" ({text!r})" if text else ""


def _url_problems(url: str) -> Iterator[Problem]:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        known = False
    # A password with a # or / in it ends the host early; a path may have an @ of its own.
    if "@" in (parts.netloc + parts.fragment if known else url):
        wrong = "" if known else "is no address with http:// or https:// and a host, or "
        wrong += "holds a user or password, and the recipe is saved with the run."
        yield Problem(wrong, "url", "Use token_variable.")
    elif not known:
        yield Problem(f"http:// or https:// with a host is needed, got {_without_query(url)!r}.", "url")
    elif any(sign.isspace() for sign in url):
        behind = "" if any(sign.isspace() for sign in _without_query(url)) else ", behind its ?"
        yield Problem(f"{_without_query(url)!r} has white space in it{behind}.", "url", "Write a space as %20.")
