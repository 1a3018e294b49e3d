"""A real server on the loopback interface; nothing is patched but the environment."""

import contextlib
import gzip
import socket
import threading
import time
from types import SimpleNamespace

import httpx2
import pytest

from tests.rewards.server import Server, lengths
from tests.trainers.helpers import PROMPTS, rollout
from toolkit.errors import ConfigError, RewardError
from toolkit.rewards import RemoteReward, score_with
from toolkit.rewards.remote import _Passing

pytestmark = pytest.mark.filterwarnings("ignore:.* before try")
RESPONSES = [[12, 13, 2], [9, 9, 8, 8, 7, 7], [20, 2], [5, 6, 7], [30, 2]]


def batch():
    return rollout(RESPONSES, [*PROMPTS, PROMPTS[0]])


@pytest.fixture
def serve(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    made = []

    def start(answers):
        made.append(Server(answers))
        return made[-1]

    yield start
    for server in made:
        server.stop()


def asking(server, **settings):
    return RemoteReward(server.url, **{"first_wait": 0.01, "timeout": 5, "retries": 2, **settings})


def test_batches_in_the_order_of_the_rollout(serve):
    server, asked = serve(lengths), batch()
    scores = score_with(asking(server, batch_size=2), asked)
    assert scores.tolist() == [len(text) for text in asked.responses]
    assert [len(message["responses"]) for message in server.messages] == [2, 2, 1]
    assert [text for message in server.messages for text in message["prompts"]] == list(asked.prompts)
    assert [message["columns"] for message in server.messages] == [
        {"number": [0, 1]},
        {"number": [2, 3]},
        {"number": [4]},
    ]
    assert all("Authorization" not in headers for headers in server.headers)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_what_passes_is_tried_again(serve, status):
    server = serve(lambda n, message: lengths(n, message) if n > 2 else (status, b"busy"))
    with pytest.warns(
        UserWarning, match=rf"{server.url}: status {status} .*\('busy'\); waiting 0.0\d s before try . of 3\."
    ):
        scores = score_with(asking(server), batch())
    assert scores.tolist() == [len(text) for text in batch().responses]
    assert len(server.messages) == 3 and server.messages[0] == server.messages[2]


def test_waits_double_and_a_server_may_ask_for_longer(serve):
    server = serve(lambda n, message: (503, b""))
    started = time.monotonic()
    with pytest.raises(RewardError):
        asking(server, first_wait=0.1)(batch())
    assert 0.3 <= time.monotonic() - started < 5
    server = serve(lambda n, message: (429, b"", 0, {"Retry-After": "1"}))
    started = time.monotonic()
    with pytest.raises(RewardError):
        asking(server, retries=1)(batch())
    assert 1 <= time.monotonic() - started < 8


def test_no_server_is_waited_for_as_long_as_it_likes():
    def waits(asked_for, tries):
        outcome = SimpleNamespace(exception=lambda: _Passing("busy", asked_for))
        return RemoteReward("http://x", first_wait=1.0)._wait(SimpleNamespace(outcome=outcome, attempt_number=tries))

    assert (waits(5.0, 1), waits(1e5, 1), waits(None, 3), waits(None, 30)) == (5.0, 60.0, 4.0, 60.0)


def test_one_that_stays_down_ends_the_run(serve):
    server = serve(lambda n, message: (500, b"out of\nmemory"))
    with pytest.raises(RewardError) as error:
        score_with(asking(server), batch())
    (problem,) = error.value.problems
    assert len(server.messages) == 3 and problem.field == "url"
    assert problem.wrong.startswith(f"{server.url} gave no answer in 3 tries over 0 s; the last: status 500")
    assert "('out of memory')" in problem.wrong and problem.remedy == "See to the server."


def test_nobody_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/"
    with pytest.raises(
        RewardError, match=r"no answer in 2 tries .* the last: ConnectionRefusedError: .*Connect call failed"
    ):
        RemoteReward(url, retries=1, first_wait=0.01)(batch())


def test_a_connection_that_breaks_off_is_tried_again(serve):
    broken = serve(
        lambda n, message: (200, b'{"scores"', 0, {"Transfer-Encoding": "chunked"}) if n < 2 else lengths(n, message)
    )
    assert score_with(asking(broken), batch()).shape == (5,) and len(broken.messages) == 2


def test_time_out(serve):
    server = serve(lambda n, message: (*lengths(n, message), 0.5 if n == 1 else 0))
    assert score_with(asking(server, timeout=0.1), batch()).shape == (5,)
    silent = serve(lambda n, message: (*lengths(n, message), 0.5))
    with pytest.raises(RewardError, match=r"no answer in 2 tries over \d s; the last: no whole answer in 0.1 s"):
        asking(silent, timeout=0.1, retries=1)(batch())


def test_a_deadline_for_all_tries_together(serve):
    down = serve(lambda n, message: (503, b""))
    started = time.monotonic()
    with pytest.raises(RewardError, match=r"gave no answer in 2 tries over 0 s; the last: status 503"):
        asking(down, deadline=0.4, first_wait=0.15, retries=9)(batch())  # a third would come after 0.45 s
    assert 0.15 <= time.monotonic() - started < 0.4 and len(down.messages) == 2


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b""),
    ],
    ids=["body", "chunks", "headers", "one header", "100 Continue", "nothing"],
)
@pytest.mark.parametrize("limit", ["timeout", "deadline"])
def test_an_answer_by_the_drop_is_not_waited_for(start, drop, limit):
    """The server is never silent for long, and never done."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(2**16)
                connection.sendall(start)
                for _ in range(500):
                    connection.sendall(drop)
                    time.sleep(0.01)

        threading.Thread(target=drip, daemon=True).start()
        url, started = f"http://127.0.0.1:{listener.getsockname()[1]}/", time.monotonic()
        reward = RemoteReward(url, retries=0, **{"timeout": 5, limit: 0.1})
        # Of a deadline a try has what is left, a little less than the whole on a busy machine.
        with pytest.raises(RewardError, match=r"in 1 tries .* the last: no whole answer in 0\.(1|0\d+) s"):
            reward(batch())
        assert time.monotonic() - started < 3  # of the 5 s and more that the drops take


def test_an_answer_without_end_is_refused(serve):
    server = serve(lambda n, message: (200, b" " * (2**24 + 1)))
    with pytest.raises(RewardError, match="gave an answer of more than 16 MiB"):
        asking(server)(batch())
    assert len(server.messages) == 1


@pytest.mark.parametrize(
    "page", [(b"busy", {"Content-Encoding": "gzip"}), (b"x" * (17 << 20), {})], ids=["compressed", "large"]
)
def test_what_passes_may_have_any_page(page, serve):
    body, headers = page
    server = serve(lambda n, message: lengths(n, message) if n > 1 else (503, body, 0, headers))
    with pytest.warns(UserWarning, match="status 503"):
        assert score_with(asking(server), batch()).shape == (5,)


def test_an_answer_may_say_that_it_is_plain(serve):
    server = serve(lambda n, message: (*lengths(n, message), 0, {"Content-Encoding": "Identity"}))
    assert score_with(asking(server), batch()).shape == (5,)


def test_a_compressed_answer_is_refused(serve):
    """32 MiB of spaces, which would be in memory before anybody could count them."""
    server = serve(lambda n, message: (200, gzip.compress(b" " * 2**25), 0, {"Content-Encoding": "gzip"}))
    with pytest.raises(RewardError, match="answered in 'gzip', where plain text was asked for"):
        asking(server)(batch())
    assert server.headers[0]["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("status", [400, 401, 404, 302])
def test_a_refusal_ends_the_run_at_once(serve, status):
    elsewhere = serve(lengths)
    server = serve(lambda n, message: (status, b"no such path", 0, {"Location": elsewhere.url}))
    server.url += "?api_key=hidden"
    with pytest.raises(RewardError, match=f"score refused a request: status {status} .*no such path") as error:
        asking(server)(batch())
    assert "hidden" not in str(error.value)
    assert len(server.messages) == 1 and not elsewhere.messages  # a redirect would take the token along


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            b"<html>Sign in</html>",
            "did not answer with JSON ('<html>Sign in</html>'); {\"scores\": [5 numbers]} is needed",
        ),
        (b"", "did not answer with JSON; "),
        (b"\x1b[2Jgone\x9b", "did not answer with JSON ('\\x1b[2Jgone"),
        (b'{"scores": [1, "\\u001b[2J", 2, 3, 4]}', "gave '\\x1b[2J' to the response"),
        (b"[1, 2, 3, 4, 5]", "answered without scores ('[1, 2, 3, 4, 5]')"),
        (b'{"scores": 1}', "answered without scores"),
        (b'{"scores": [1, 2]}', "answered with 2 scores for 5 responses"),
        (b'{"scores": [1, NaN, 2, 3, 4]}', "gave nan to the response '"),
        (b'{"scores": [1, 1e300, 2, 3, 4]}', "gave 1e+300 to the response '"),
        (b'{"scores": [1, null, 2, 3, 4]}', "gave None to the response '"),
        (b'{"scores": [true, 1, 2, 3, 4]}', "gave True to the response '"),
        (b'{"scores": [1, 2, 3, 4, 1' + b"0" * 400 + b"]}", "gave inf to the response '"),
        (b"[" * 10**5, "did not answer with JSON ('[[[[["),
    ],
)
def test_an_answer_of_another_form(serve, body, message):
    server = serve(lambda n, _: (200, body))
    with pytest.raises(RewardError) as error:
        asking(server)(batch())
    assert message in str(error.value) and server.url in str(error.value)
    assert len(server.messages) == 1


def test_the_token_comes_from_the_environment(serve, monkeypatch):
    server = serve(lengths)
    monkeypatch.setenv("REWARD_TOKEN_FOR_TEST", " s3cret\n")
    reward = asking(server, token_variable="REWARD_TOKEN_FOR_TEST")
    score_with(reward, batch())
    assert server.headers[0]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(reward)
    monkeypatch.setenv("REWARD_TOKEN_FOR_TEST", "s3\ncret")
    with pytest.raises(RewardError, match="REWARD_TOKEN_FOR_TEST holds signs that no token has") as error:
        asking(server, token_variable="REWARD_TOKEN_FOR_TEST")
    assert "cret" not in str(error.value)
    monkeypatch.delenv("REWARD_TOKEN_FOR_TEST")
    with pytest.raises(RewardError, match="^token_variable: the environment has no variable REWARD_TOKEN_FOR"):
        asking(server, token_variable="REWARD_TOKEN_FOR_TEST")


@pytest.mark.parametrize("user", ["alice:pa#ss", "alice:12#ss", "alice:pa/ss", "alice: pass", "[alice:pass"])
def test_a_password_in_the_address_is_not_shown(user):
    with pytest.raises(ConfigError, match="url — .*holds a user or password") as error:
        RemoteReward(f"https://{user}@host/score")
    assert "ss@" not in str(error.value)
    RemoteReward("https://host/@me/score?to=a@b")


def test_a_key_in_an_address_that_is_refused_is_not_shown():
    with pytest.raises(ConfigError, match=r"url — http:// or https:// .* is needed, got 'htps://host/score'\.$"):
        RemoteReward("htps://host/score?api_key=hidden")
    with pytest.raises(
        ConfigError, match=r"'https://host/score' has white space in it, behind its \?\. Write a space as"
    ):
        RemoteReward("https://host/score?api_key=hid den")
    with pytest.raises(ConfigError, match=r"'https://host/sco re' has white space in it\. Write"):
        RemoteReward("https://host/sco re?api_key=hidden")


def test_a_column_that_is_no_json(serve):
    server = serve(lengths)
    asked = type(batch())(**{**vars(batch()), "columns": {"number": [1] * 5, "picture": [b"\0"] * 5}})
    with pytest.raises(RewardError, match='the column "picture" of the prompts cannot be sent as JSON'):
        asking(server)(asked)
    assert not server.messages


def test_the_client_has_no_time_out_of_its_own(serve, monkeypatch):
    """httpx would give up after 5 seconds of silence, whatever `timeout` says."""
    made, client = [], httpx2.AsyncClient
    monkeypatch.setattr(httpx2, "AsyncClient", lambda **named: made.append(client(**named)) or made[-1])
    score_with(asking(serve(lengths)), batch())
    assert {*made[0].timeout.as_dict().values()} == {None}
