"""Every error that this package raises to its users.

Each class has one HTTP status and one stable code. A message says what was received, what was expected and what to
do, in one line."""

from collections.abc import Mapping

# The slot for the field's name in the message of an InvalidRequestError; the repr() of a value never holds it.
PARAM = "\0param\0"
_PROMPT_PARAMS = ("prompt", "input_ids", "text")


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

    A message that writes the field's name as `PARAM` can be shown under another surface's name for it: `renamed`.
    `index`: the prompt that is refused, of a call with several; the message names it as `prompt[index]`.
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
    ) -> None:
        field, prefix = param or "", ""
        if index is not None:
            is_prompt = param in _PROMPT_PARAMS
            named = f"{param if is_prompt else 'prompt'}[{index}]"
            field, prefix = (named, "") if is_prompt and PARAM in message else (field, f"{named}: ")
        super().__init__(prefix + message.replace(PARAM, field))
        self.param, self.sent, self.index, self._template = param, sent, index, message
        if code is not None:
            self.code = code

    def renamed(self, param: str) -> "InvalidRequestError":
        """Return this error about the same field under the name `param`."""
        return type(self)(self._template, param=param, code=self.code, sent=self.sent, index=self.index)

    def at_prompt(self, index: int | None) -> "InvalidRequestError":
        """Return this error about the prompt `index` of several; None: of a call with one."""
        return type(self)(self._template, param=self.param, code=self.code, sent=self.sent, index=index)


class CaptureDisabledError(InvalidRequestError):
    """A request asks for routed experts, but the engine records none."""

    code = "capture_disabled"


class PromptTooLongError(InvalidRequestError):
    """A prompt, or a prompt with its new tokens, does not fit the context or the page pool."""

    code = "context_length_exceeded"


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
    """Rows do not fit the tokens or the model they are replayed on; names sample, row and layer."""

    code = "routing_alignment"


class RoutingReplayError(RoutedExpertsError):
    """A replay went wrong: the canary tripped or a router received ids of another."""

    code = "routing_replay"
