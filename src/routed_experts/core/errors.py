"""Every error that this package raises to its users.

Each class has one HTTP status and one stable code. A message says what was received, what was expected and what to
do, in one line."""

import contextlib
import functools
import re
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

# The slot for the field's name in the message of an InvalidRequestError; the repr() of a value never holds it.
PARAM = "\0param\0"
_SLOT = re.compile("\0([a-z_]+)\0")
_PROMPT_PARAMS = ("prompt", "input_ids", "text")
OWN_NAMES: Mapping[str, str] = MappingProxyType({})  # of callers that have no other names for fields


def field_slot(field: str) -> str:
    """Return the slot for the name of another field in the message of an InvalidRequestError."""
    return f"\0{field}\0"


class RoutedExpertsError(Exception):
    """Base of all errors of this package."""

    status = 500
    code = "internal_error"


class ConfigError(RoutedExpertsError):
    """A configuration cannot work; raised before anything is allocated."""

    status = 400
    code = "config_error"


class MachineError(ConfigError):
    """The machine cannot serve the configuration: a missing device, or too little memory. Commands exit with 1."""


class WriteError(MachineError, OSError):
    """A file could not be written, for example on a full disk; no partial file is left under its name."""

    status = 500
    code = "write_error"


class MemoryPlanError(MachineError):
    """A model does not fit the device with these arguments; raised before anything is allocated. `ways`: changes of the
    arguments, each of which would make it fit; empty if none does."""

    code = "does_not_fit"

    def __init__(self, message: str, *, ways: tuple[Mapping[str, int | float], ...]) -> None:
        super().__init__(message)
        self.ways = ways

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with `ways`, which Exception would leave out of the call that makes the copy."""
        return functools.partial(type(self), ways=self.ways), self.args, self.__dict__


class CheckpointError(ConfigError):
    """A checkpoint is missing, damaged, or not of the shape its config promises."""

    code = "checkpoint_error"


class CaptureUnsupportedError(ConfigError):
    """Routed experts cannot be captured with this model or backend; raised when the engine is built."""

    code = "capture_unsupported"


class PlacementError(ConfigError, ValueError):
    """A placement, a residency map, or what they are planned from cannot be used; raised before anything is allocated
    or moved."""

    code = "placement_error"


class InvalidRequestError(RoutedExpertsError, ValueError):
    """A request holds a value that cannot be served; `param` names the field.

    A message that writes its field as `PARAM`, and others as `field_slot(name)`, can be shown under another surface's
    names: `renamed`, `with_names`. `index`: the prompt that is refused, of a call with several; the message names it as
    `prompt_field[index]`. `depends_on_prompt`: another prompt might be served with this value.
    `sent`: the part of the message that renders a path of the client's own. HTTP shows it, and hides other paths."""

    status = 400
    code = "invalid_request"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        sent: str | None = None,
        index: int | None = None,
        prompt_field: str = "prompt",
        depends_on_prompt: bool = False,
        names: Mapping[str, str] = OWN_NAMES,
    ) -> None:
        """`names`: of other fields in the message, where they are not their own."""
        field, prefix = param or "", ""
        if index is not None:
            named = f"{prompt_field}[{index}]"
            is_slot = param == prompt_field and PARAM in message
            field, prefix = (named, "") if is_slot else (field, f"{named}: ")
        text = _SLOT.sub(lambda slot: names.get(slot[1], slot[1]), message.replace(PARAM, field))
        super().__init__(prefix + text)
        self.param, self.sent, self.index, self._template = param, sent, index, message
        self._prompt_field, self._depends_on_prompt, self._names = prompt_field, depends_on_prompt, dict(names)
        if code is not None:
            self.code = code

    @property
    def is_of_prompt(self) -> bool:
        """Whether the prompt is refused, or a value that another prompt might be served with."""
        return self._depends_on_prompt or self.param in _PROMPT_PARAMS

    def renamed(self, param: str) -> "InvalidRequestError":
        """Return this error about the same field under the name `param`."""
        return self._copy(param=param, index=self.index, prompt_field=self._prompt_field, names=self._names)

    def with_names(self, names: Mapping[str, str]) -> "InvalidRequestError":
        """Return this error with every field under the name that another surface has for it; itself where none has
        another."""
        slots = {slot: self._names.get(slot, slot) for slot in map(str, _SLOT.findall(self._template))}
        named = self._copy(
            param=None if self.param is None else names.get(self.param, self.param),
            index=self.index,
            prompt_field=names.get(self._prompt_field, self._prompt_field),
            names={slot: names.get(name, name) for slot, name in slots.items()},
        )
        return self if (named.param, str(named)) == (self.param, str(self)) else named

    def at_prompt(self, index: int | None, field: str = "prompt") -> "InvalidRequestError":
        """Return this error about the prompt `index` of several in this field; None: of a call with one."""
        return self._copy(param=self.param, index=index, prompt_field=field, names=self._names)

    def _copy(
        self, *, param: str | None, index: int | None, prompt_field: str, names: Mapping[str, str]
    ) -> "InvalidRequestError":
        return type(self)(
            self._template,
            param=param,
            code=self.code,
            sent=self.sent,
            index=index,
            prompt_field=prompt_field,
            depends_on_prompt=self._depends_on_prompt,
            names=names,
        )


def raise_as(error: InvalidRequestError, named: InvalidRequestError) -> NoReturn:
    """Raise `named` because of `error`, which may be the same. Of an `except` clause: a context manager costs time in
    each call that is not refused."""
    if named is error:
        raise error
    raise named from error


@contextlib.contextmanager
def field_names(fields: Mapping[str, str]) -> Generator[None]:
    """Rename the fields that an InvalidRequestError names. `fields`: the engine's parameter -> the caller's field."""
    try:
        yield
    except InvalidRequestError as error:
        raise_as(error, error.with_names(fields))


@contextlib.contextmanager
def prompt_index(index: int | None, field: str) -> Generator[None]:
    """Name the prompt `index` of several in this field in an InvalidRequestError; None: of a call with one."""
    try:
        yield
    except InvalidRequestError as error:
        if index is None:
            raise
        raise error.at_prompt(index, field) from error


class CaptureDisabledError(InvalidRequestError):
    """A request asks for routed experts, but the engine records none."""

    code = "capture_disabled"


class PromptTooLongError(InvalidRequestError):
    """A prompt, or a prompt with its new tokens, does not fit the context or the page pool."""

    code = "context_length_exceeded"

    @property
    def is_of_prompt(self) -> bool:
        """Always: another prompt may fit."""
        return True


class QueueFullError(RoutedExpertsError):
    """The waiting queue is full; try again later."""

    status = 429
    code = "queue_full"


class WeightsMismatchError(InvalidRequestError):
    """New weights differ from the served ones in tree, shape or dtype."""

    code = "weights_mismatch"


class UpdateInProgressError(RoutedExpertsError):
    """New weights are on their way already; updates are not queued."""

    status = 409
    code = "update_in_progress"


class RoutingIncompleteError(RoutedExpertsError):
    """A row that the row law promises is not known; the request fails rather than return a guess."""

    code = "routing_incomplete"


class EngineDeadError(RoutedExpertsError):
    """The engine thread has ended; every waiting request fails with its cause."""

    status = 503
    code = "engine_dead"


class PeerLostError(EngineDeadError):
    """A process of the group ended, was silent or did not finish an order; the whole group ends. `exit_code`: of the
    processes that end with it; 2 where a configuration was at fault."""

    code = "peer_lost"
    exit_code: int = 3


class ReplicaLostError(EngineDeadError):
    """An engine of a fleet has ended, by itself or with its machine. What it ran is lost; others are not touched."""

    code = "replica_lost"


class ProcessMismatchError(EngineDeadError):
    """Processes of a group differ in what must be equal: programs, orders or tokens; the whole group ends."""

    code = "process_mismatch"


class OrderFormatError(ProcessMismatchError):
    """Bytes between the processes of a group are no order of this protocol."""

    code = "order_format"


class RoutingFormatError(RoutedExpertsError, ValueError):
    """A payload of routed experts cannot be decoded."""

    code = "routing_format"


class RoutingAlignmentError(RoutedExpertsError, ValueError):
    """Rows do not fit the tokens or the model they are replayed on; names sample, row and layer. `sample`: the index
    that the message begins with, None for a message without."""

    code = "routing_alignment"

    def __init__(self, message: str, *, sample: int | None = None) -> None:
        super().__init__(message if sample is None else f"sample {sample}{message}")
        self.sample, self._of_sample = sample, message

    def at_sample(self, sample: int) -> "RoutingAlignmentError":
        """Return this error about the sample of another index."""
        return self if self.sample in (None, sample) else RoutingAlignmentError(self._of_sample, sample=sample)


class RoutingReplayError(RoutedExpertsError):
    """A replay went wrong: the canary tripped or a router received ids of another."""

    code = "routing_replay"
