"""`routed-experts chat MODEL`: a conversation in the terminal. /new starts another; /quit or the end of input ends."""

import argparse
import dataclasses
import sys
from typing import Any, cast

from routed_experts.cli.bootstrap import LoadBar, announce_compilation, start_jax
from routed_experts.cli.flags import (
    MODEL_HELP,
    add_engine_flags,
    add_speculative_flags,
    check_sampling_flags,
    engine_args,
    load_format,
    log_ignored_flags,
    speculative_args,
)
from routed_experts.core.errors import ConfigError, InvalidRequestError, PromptTooLongError
from routed_experts.core.interrupts import hold_interrupts
from routed_experts.core.server_args import ServerArgs

_HINT = "/new starts a new conversation, Ctrl-C ends an answer, /quit or Ctrl-D ends the chat"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `chat`."""
    parser.add_argument("model_path", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--system", default=None, metavar="TEXT", help="first message")
    parser.add_argument("--max-new-tokens", type=int, default=512, metavar="N", help="of an answer; default: 512")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T", help="default: 0.7; 0 is greedy")
    add_engine_flags(parser, leave_out=("model_path", "skip_tokenizer_init"))
    add_speculative_flags(parser)


def run(options: argparse.Namespace, start_time: float) -> int:
    """Answer each line of standard input."""
    log_ignored_flags(options)
    check_sampling_flags(options)
    args, speculative = ServerArgs(**engine_args(options)), speculative_args(options)
    start_jax(default_platform=None)
    announce_compilation(args)
    with hold_interrupts():
        from routed_experts.engine.engine import Engine

    first = [] if options.system is None else [{"role": "system", "content": options.system}]
    on_load = LoadBar() if sys.stderr.isatty() else None
    parts: dict[str, Any] = {"load_format": load_format(options), "speculative": speculative}
    with Engine(**dataclasses.asdict(args), **parts, on_load=on_load) as engine:
        tokenizer = engine.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise ConfigError(f"{args.model_path} has no chat template; use routed-experts generate")
        messages = list(first)
        if sys.stdin.isatty():
            print(_HINT)
        while (line := _read_line()) is not None and line.strip() != "/quit":
            if line.strip() == "/new":
                messages = list(first)
                continue
            if not line.strip():
                continue
            messages.append({"role": "user", "content": line})
            text = tokenizer.apply_chat_template(messages)
            try:
                answer = _answer(engine, tokenizer.encode(text, add_special_tokens=False), options)
            except InvalidRequestError as error:
                is_too_long = isinstance(error, PromptTooLongError)  # the conversation has grown beyond the context
                print(f"({error}{'; /new starts a new conversation' if is_too_long else ''})", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0


def _read_line() -> str | None:
    """The next line; None at the end of input."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    try:
        line = sys.stdin.readline() or None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is no UTF-8 ({error}); convert it to UTF-8") from error
    if line is None and sys.stdin.isatty():
        print()  # the shell's prompt begins a line of its own
    return line


def _answer(engine: Any, ids: list[int], options: argparse.Namespace) -> str:
    """Print an answer as it is generated, and return it. An interrupt ends it early."""
    printed = ""
    num_free = engine.get_server_info()["context_length"] - len(ids)
    length = max(1, min(options.max_new_tokens, num_free))
    stream = engine.generate(
        input_ids=ids, sampling_params={"temperature": options.temperature}, max_new_tokens=length, stream=True
    )
    try:
        for output in stream:
            text = cast("str", output["text"])
            print(text[len(printed) :], end="", flush=True)
            printed = text
    except KeyboardInterrupt:
        stream.close()
    print()
    return printed
