"""``areno chat``: chat with a model in the terminal, or answer each line of piped input."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areno.cli.serve import load_engine
from areno.config.packages import require_packages
from areno.config.serve_options import ChatOptions, ServeOptions, parse_chat
from areno.errors import ArenoError, UsageError
from areno.observability.chart import printable
from areno.observability.logs import setup_logging
from areno.serving.client import ChatClient

_HELP = "/reset clears the conversation, /system TEXT sets the system message, /quit exits"


def run(argv: Sequence[str]) -> int:
    """Run the command."""
    options = parse_chat(argv)
    first = _first_messages(options.messages) if options.messages else []
    with setup_logging(None, level="WARNING"), _server(options) as (client, model):
        conversation = ChatSession(client, model, options, first)
        if sys.stdin.isatty() and sys.stdout.isatty():
            _chat(conversation)
        else:
            _answer_lines(conversation)
    return 0


@contextmanager
def _server(options: ChatOptions) -> Iterator[tuple[ChatClient, str]]:
    """Yield a client and the model's name. Without ``--base-url``, the server runs in this process."""
    if options.base_url:
        client = ChatClient(options.base_url, options.api_key)
        yield client, options.model or client.first_model()
        return
    require_packages("serve", "areno chat --model-path needs")
    from areno.serving.server import ServerThread
    from areno.serving.service import Service, ServingConfig

    model = str(options.model_path)
    print(f"loading {model} ...", file=sys.stderr, flush=True)
    shared = ("model_path", "attn_backend", "kv_cache_tokens", "device", "dtype", "trust_remote_code")
    engine = load_engine(ServeOptions(**{name: getattr(options, name) for name in shared}, max_running_prompts=1))
    try:
        with ServerThread(Service(ServingConfig(model_name=model), engine)) as server:
            yield ChatClient(server.base_url), model
    finally:
        engine.close()


class ChatSession:
    """A chat with one model on a server: history, system message and sampling parameters."""

    def __init__(
        self, client: ChatClient, model: str, options: ChatOptions, first: Sequence[dict[str, str]] = ()
    ) -> None:
        self._client = client
        has_system = bool(first) and first[0]["role"] == "system"
        self.system = options.system or (first[0]["content"] if has_system else None)
        self._first = list(first[has_system:])
        self.messages = list(self._first)
        self._body: dict[str, Any] = {
            "model": model,
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "top_p": options.top_p,
            **({"top_k": options.top_k} if options.top_k != -1 else {}),
            **({"seed": options.seed} if options.seed is not None else {}),
            **({"chat_template_kwargs": {"enable_thinking": False}} if options.disable_thinking else {}),
        }

    def ask(self, question: str) -> Iterator[tuple[str, bool]]:
        """Ask a question, and yield the answer in chunks ``(text, is_reasoning)``.

        The history changes only when the answer is complete.
        """
        messages = [*self.messages, {"role": "user", "content": question}]
        system = [{"role": "system", "content": self.system}] if self.system else []
        answer = ""
        for delta in self._client.stream({**self._body, "messages": [*system, *messages]}):
            if text := delta.get("reasoning_content"):
                yield text, True
            if text := delta.get("content"):
                answer += text
                yield text, False
        self.messages = [*messages, {"role": "assistant", "content": answer}]

    def command(self, line: str) -> str | None:
        """Execute ``/reset`` or ``/system``, and return the notice to show. For any other line, return None."""
        name, _, text = line.partition(" ")
        if name == "/reset":
            self.messages = list(self._first)
            return "conversation cleared"
        if name == "/system":
            self.system = text.strip() or None
            return f"system message: {self.system or 'none'}"
        return None


def _first_messages(file: str) -> list[dict[str, str]]:
    """Read the messages of ``--messages``. Raises UsageError if the file cannot be read or is not a list of messages."""
    try:
        messages = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--messages {file} cannot be read as JSON: {error}; correct the file") from error
    valid = isinstance(messages, list) and all(
        isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        for message in messages
    )
    if not valid:
        raise UsageError(
            f'--messages {file} is not a list of messages; write [{{"role": "user", "content": "..."}}, ...]'
        )
    return messages


def _answer_lines(conversation: ChatSession) -> None:
    for question in _questions():
        if question == "/quit":
            return
        if not question or conversation.command(question) is not None:
            continue
        for text, is_reasoning in conversation.ask(question):
            if not is_reasoning:
                print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
        print(flush=True)


def _questions() -> Iterator[str]:
    try:
        yield from (line.strip() for line in sys.stdin)
    except UnicodeDecodeError as error:
        raise UsageError(
            f"the input is not text in {sys.stdin.encoding}: {error}; convert the input, for example with iconv"
        ) from error


def _chat(conversation: ChatSession) -> None:
    """Chat interactively; Ctrl-C stops an answer, Ctrl-D exits."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(_HELP, style="dim")
    while True:
        try:
            question = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if question == "/quit":
            return
        if not question:
            continue
        if (notice := conversation.command(question)) is not None:
            console.print(notice, style="dim")
        elif question.startswith("/"):
            console.print(f"{question.split()[0]} is not a command; {_HELP}", style="dim", markup=False)
        else:
            _show(console, conversation, question)


def _show(console: Any, conversation: ChatSession, question: str) -> None:
    try:
        for text, is_reasoning in conversation.ask(question):
            console.print(
                printable(text), end="", style="dim italic" if is_reasoning else None, markup=False, soft_wrap=True
            )
        console.print()
    except KeyboardInterrupt:
        console.print("\nthe answer was stopped and the question discarded", style="dim")
    except ArenoError as error:
        console.print(f"\nerror: {error}", style="red", markup=False)
