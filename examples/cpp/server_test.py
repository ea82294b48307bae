"""Runs the server of server.cpp as its clients meet it: python3 server_test.py MODEL COMMAND...

COMMAND is the server, with a tool such as valgrind in front of it or not; the model and a port are put behind it.
"""

import contextlib
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

MODEL, COMMAND = sys.argv[1], sys.argv[2:]
# valgrind takes its time
STREAMS, TOKENS, LONG = (3, 6, 8) if "valgrind" in COMMAND else (8, 200, 2000)


@contextlib.contextmanager
def server():
    """A server's port. It must end well when it is told to."""
    process = subprocess.Popen([*COMMAND, MODEL, "0"], stderr=subprocess.PIPE, text=True)
    try:
        port = next(filter(None, (re.search(r"listening on http://127\.0\.0\.1:(\d+)", line) for line in process.stderr)))
        yield int(port[1])
        process.send_signal(signal.SIGTERM)
        rest = process.communicate(timeout=120)[1]
        assert process.returncode == 0, f"the server ended with {process.returncode}: {rest}"
    finally:
        process.kill()


def post(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    # what curl says about JSON if nobody tells it better
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/x-www-form-urlencoded"})
    return connection.getresponse()


def ask(port, number):
    """The text of an answer, a long one with most seeds."""
    question = {"role": "user", "content": "Write a story about the sea."}
    response = post(port, json.dumps({"messages": [question], "max_tokens": TOKENS, "seed": number}))
    assert response.status == 200 and response.headers["Content-Type"] == "text/event-stream"
    text, reason = "", None
    for line in response:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            assert reason in ("stop", "length"), f"an answer ended for the reason {reason}"
            return text
        if line.startswith(b"data: "):
            assert reason is None, f"after the last chunk came {data}"
            (choice,) = json.loads(data)["choices"]
            text, reason = text + choice["delta"].get("content", ""), choice["finish_reason"]
        else:
            assert not data or data.startswith(":"), data
    raise AssertionError(f"the stream ended early: {text}")


def metric(port, name):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    return float(re.search(rf"^{name} (\S+)$", text, re.MULTILINE)[1])


def eight_streams_share_steps_and_each_has_what_it_has_alone():
    with server() as port:
        alone = [ask(port, number) for number in range(STREAMS)]
        assert all(alone) and metric(port, "dsv4_batch_sessions_sum") == metric(port, "dsv4_steps_total")
    with server() as port:
        together = [""] * STREAMS

        def stream(number):
            together[number] = ask(port, number)

        threads = [threading.Thread(target=stream, args=[number]) for number in range(STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(set(alone)) == STREAMS and together == alone, f"{together} are not what they are alone, {alone}"
        mean = metric(port, "dsv4_batch_sessions_sum") / metric(port, "dsv4_steps_total")
        assert mean > STREAMS / 4 and mean > 1, f"only {mean:.1f} sessions a step"
        print(f"server: {STREAMS} streams as alone, {mean:.1f} sessions a step")


def a_client_that_hangs_up_frees_its_session(port, sentences, until):
    """It hangs up when `until` has come: in its prompt or in its answer."""
    body = json.dumps({"messages": [{"role": "user", "content": "A long question. " * sentences}]})
    client = socket.create_connection(("127.0.0.1", port))
    client.sendall(f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
    heard = b""
    while until not in heard:
        part = client.recv(4096)
        assert part, heard
        heard += part
    assert metric(port, "dsv4_sessions") == 1
    client.close()
    end = time.monotonic() + 60
    while metric(port, "dsv4_sessions") != 0:
        assert time.monotonic() < end, "its session is left"
        time.sleep(0.01)


def wrong_requests_are_refused_in_words(port):
    for body, words in [
        ("{", "parse error"),
        ("{}", "messages"),
        ("[]", "array"),
        ('{"messages": []}', "messages"),
        ('{"messages": [{"role": "king"}]}', "king"),
        ('{"messages": [{"role": "user", "content": "x"}], "temperature": -1}', "temperature"),
        ('{"messages": [{"role": "user", "content": "x"}], "seed": "x"}', "number"),
        ('{"messages": [{"role": "user", "content": "x"}], "stream": false}', "stream"),
        (json.dumps({"messages": [{"role": "user", "content": "word " * 70000}]}), "context"),
        ('{"messages": ' + "[" * 1000000, "nested"),
    ]:
        response = post(port, body)
        text = response.read().decode()
        assert response.status == 400 and words in text, f"{body[:80]}: {response.status} {text}"
    assert metric(port, "dsv4_sessions") == 0


def a_port_that_cannot_be_had_is_named(port):
    for name, words in [(str(port), f":{port} cannot"), ("70000", "65535"), ("80x", "65535"), ("", "65535")]:
        other = subprocess.run([*COMMAND, MODEL, name], stderr=subprocess.PIPE, text=True, timeout=120)
        assert other.returncode != 0 and words in other.stderr, f"port {name!r}: {other.stderr}"


def an_end_does_not_wait_for_answers(port):
    response = post(port, json.dumps({"messages": [{"role": "user", "content": "Hello"}]}))
    while not response.readline().startswith(b"data: "):
        pass


eight_streams_share_steps_and_each_has_what_it_has_alone()
with server() as port:
    a_client_that_hangs_up_frees_its_session(port, LONG, b"working")
    a_client_that_hangs_up_frees_its_session(port, 1, b"data: ")
    wrong_requests_are_refused_in_words(port)
    a_port_that_cannot_be_had_is_named(port)
    an_end_does_not_wait_for_answers(port)
print("server: clients that hang up and wrong requests leave nothing behind")
