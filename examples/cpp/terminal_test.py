"""Drives the program of terminal.cpp through a pseudo terminal: python3 terminal_test.py MODEL COMMAND...

COMMAND is the program, with a tool such as valgrind in front of it or not; the model is put behind it.
"""

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

MODEL, COMMAND = sys.argv[1], sys.argv[2:]
ROWS, COLUMNS = 12, 60
STORY = "Write a story about the sea."  # a long one, always the same


class Terminal:
    """What a person sees: a screen of characters with its scrollback, and a keyboard."""

    def __init__(self, fd):
        self.fd, self.raw = fd, b""
        self.lines, self.row, self.column = [""], 0, 0  # all lines, those of the scrollback too
        self.decoder, self.rest = codecs.getincrementaldecoder("utf-8")(), ""

    def read(self, seconds):
        """Whether something came."""
        if not select.select([self.fd], [], [], seconds)[0]:
            return False
        try:
            part = os.read(self.fd, 65536)
        except OSError:  # nobody has the other end any more
            return False
        self.raw += part
        text = self.rest + self.decoder.decode(part)
        self.rest = re.search(r"(\x1b(\[[0-9;?]*)?)?$", text)[0]  # the beginning of a sequence
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|[\s\S]", text.removesuffix(self.rest)):
            self.show(token)
        return bool(part)

    def show(self, token):
        top = max(0, len(self.lines) - ROWS)
        if token == "\r":
            self.column = 0
        elif token == "\n":
            self.row += 1
            if self.row == len(self.lines):
                self.lines.append("")
        elif token == "\x1b[J":
            self.lines[self.row] = self.lines[self.row][: self.column]
            self.lines[self.row + 1 :] = []
        elif move := re.fullmatch(r"\x1b\[(\d)A", token):
            self.row = max(top, self.row - int(move[1]))
        elif not re.fullmatch(r"\x1b\[7?m", token):
            assert token >= " ", f"{token!r} is not for a terminal with a scrollback"
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + token + line[self.column + 1 :]
            self.column += 1
            assert self.column < COLUMNS or "/nowhere" in line, f"the line is too long: {line}"

    def wait(self, what, limit=300):
        """Until a line of the screen has `what`, an expression."""
        end = time.monotonic() + limit
        while not any(re.search(what, line) for line in self.lines[-ROWS:]):
            assert time.monotonic() < end and self.read(end - time.monotonic()), f"no {what!r} in {self.lines[-ROWS:]}"

    def type(self, keys):
        os.write(self.fd, keys.encode())

    def said(self):
        """What stays when status and input are gone."""
        return "\n".join(self.lines[:-2])


@contextlib.contextmanager
def program(*arguments):
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    before = termios.tcgetattr(screen)
    environment = {**os.environ, "TERM": "xterm"}
    process = subprocess.Popen([*COMMAND, *arguments], stdin=screen, stdout=screen, stderr=screen, env=environment)
    try:
        yield process, Terminal(keyboard), lambda: termios.tcgetattr(screen) == before
    finally:
        process.kill()
        process.wait()
        os.close(keyboard)
        os.close(screen)


def ends(process, terminal, status):
    """Reads until it has ended."""
    end = time.monotonic() + 120
    while process.poll() is None:
        assert time.monotonic() < end, "it does not end"
        terminal.read(0.05)
    while terminal.read(0):
        pass
    assert process.returncode == status, f"it ended with {process.returncode}: {terminal.lines[-ROWS:]}"


def answers_stream_while_keys_are_typed_and_are_cancelled(sentences):
    with program(MODEL) as (process, terminal, is_restored):
        terminal.wait("Enter asks")
        assert not is_restored()
        terminal.type(STORY + "\r")
        terminal.wait(r"^ \d+ tokens, [0-9.]+ a second \| cache \d+ of \d+ KiB")
        terminal.type("Zwölf \x1b[D\x7f")  # an arrow means nothing, the space is taken back
        terminal.wait("^> Zwölf$")
        # only what goes on can be cancelled
        terminal.type("\x1b")
        terminal.wait("^ cancelled")
        terminal.wait("^> Zwölf$")
        assert process.poll() is None
        story = terminal.said()

        # Ctrl-C takes back what was typed, and cancels what is asked, while it is read too
        terminal.type("\x03")
        terminal.wait("^> $")
        terminal.type("A long question. " * sentences + "\r")
        terminal.wait(r"^ \d+ tokens")
        terminal.type("\x03")
        terminal.wait("^ cancelled")

        # a question that is asked while an answer comes is next
        terminal.type("Hello\r")
        terminal.type("Who are you?\r")
        terminal.wait("^> Hello")
        terminal.type("\x1b")
        terminal.wait("^> Who are you")
        terminal.wait(r"^ (\d+ tokens, |cancelled)")  # Esc can have come late
        terminal.type("\x04")
        ends(process, terminal, 0)
        assert is_restored()
        said = terminal.said()
        assert said.startswith(story.rstrip()) and len(story.split("\n")[1]) > 3, f"{story!r} is not in {said!r}"
        for line in ["> " + STORY, "> Hello", "> Who are you?"]:
            assert line in said.split("\n"), f"{line!r} is not in {said!r}"
        assert said.replace("\n", " ").count("A long question.") == sentences and " | cache " not in said


def the_terminal_is_as_before_after_a_signal():
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGSEGV, signal.SIGABRT):
        with program(MODEL) as (process, terminal, is_restored):
            terminal.wait("Enter asks")
            terminal.type(STORY + "\r")
            terminal.wait(r"^ \d+ tokens, ")
            assert not is_restored()
            process.send_signal(number)
            ends(process, terminal, -number)
            assert is_restored(), f"the terminal is not as it was after {number!r}"


def what_cannot_be_is_said_in_words():
    with program("/nowhere") as (process, terminal, is_restored):
        ends(process, terminal, 1)
        assert b"/nowhere/config.json" in terminal.raw and is_restored()
    refused = subprocess.run([*COMMAND, MODEL], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert refused.returncode == 2 and "in a terminal" in refused.stderr


if "valgrind" in COMMAND:  # it is slow, and deadly signals are its own
    answers_stream_while_keys_are_typed_and_are_cancelled(sentences=5)
else:
    answers_stream_while_keys_are_typed_and_are_cancelled(sentences=800)
    the_terminal_is_as_before_after_a_signal()
what_cannot_be_is_said_in_words()
print("terminal: typing, cancels, scrollback, and a terminal that is restored")
