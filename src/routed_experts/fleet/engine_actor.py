"""EngineActor: one engine of an EngineGroup, in a process of its own that Ray starts.

Answers are plain dicts and NumPy arrays; Ray's object store carries them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from routed_experts.core.errors import RoutedExpertsError
from routed_experts.core.routed_experts import RoutedExperts
from routed_experts.fleet.abortable_calls import AbortableCalls
from routed_experts.fleet.follower_actor import start_followers
from routed_experts.fleet.ray_runtime import actor_id, import_ray
from routed_experts.fleet.spec import ReplicaSpec
from routed_experts.formats.meta_info import record_from_meta_info
from routed_experts.formats.wire import PAYLOAD_KEY, WEIGHTS_KEY


class EngineActor:
    """One engine in a process of its own, with its followers in the bundles after its own."""

    def __init__(self, spec: ReplicaSpec, follower_bundles: list[int]) -> None:
        from routed_experts.engine.engine import Engine
        from routed_experts.execution.absent_tpu import skip_absent_tpu

        skip_absent_tpu()
        dist, self._followers = None, list[Any]()
        self._calls = AbortableCalls()
        self._failure: RoutedExpertsError | None = None  # raised here, Ray would hide it behind the actor's death
        try:
            if follower_bundles:
                group = import_ray("ray.util").get_current_placement_group()
                dist, self._followers = start_followers(spec, placement_group=group, bundle_indices=follower_bundles)
            self._engine = Engine(
                **dataclasses.asdict(spec.args),
                **spec.parts,
                experts=spec.experts,
                dist=dist,
                seed_stream=actor_id(),
            )
        except RoutedExpertsError as error:
            self._failure = error

    def ready(self) -> dict[str, object]:
        """Wait until the engine is ready; returns its stats. Raises why it could not start."""
        if self._failure is not None:
            raise self._failure
        return self.stats()

    def generate(
        self,
        input_ids: Sequence[Sequence[int]],
        sampling_params: Mapping[str, object] | None,
        options: dict[str, Any],
        call_id: str,
    ) -> list[dict[str, Any]] | None:
        """Generate for several prompts, each of token ids. None where `abort` ended it."""
        results: Any = self._calls.run(
            call_id,
            lambda: self._engine.async_generate(
                input_ids=[list(ids) for ids in input_ids], sampling_params=sampling_params, **options
            ),
        )
        return None if results is None else [_with_arrays(result) for result in results]

    def abort(self, call_id: str) -> None:
        """End the `generate` of this id, which may wait for a thread."""
        self._calls.abort(call_id)

    def score(
        self,
        token_ids: Sequence[Sequence[int]],
        routed: Sequence[RoutedExperts | None] | None,
        options: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """Score several sequences."""
        outputs = self._engine.score([list(ids) for ids in token_ids], routed=routed, **options)
        return [
            {
                "token_ids": output.token_ids,
                "logprobs": output.logprobs,
                "weight_version": output.weight_version,
                "update_count": output.update_count,
                **_rows(output.routed_experts),
            }
            for output in outputs
        ]

    def remember_rollouts(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        seed: int | None,
        choice: int,
        extra_key: str | None,
    ) -> None:
        """`Engine.remember_rollouts`."""
        self._engine.remember_rollouts(prompt_ids, output_ids, seed=seed, choice=choice, extra_key=extra_key)

    def flush_cache(self, drafts: bool, retract: bool) -> int:
        """`Engine.flush_cache`."""
        return self._engine.flush_cache(drafts=drafts, retract=retract)

    def prepare_weights(self, path: str, version: str | int | None) -> None:
        """`Engine.prepare_weights`."""
        self._engine.prepare_weights(path, version=version)

    def commit_weights(self, version: str | int | None, cache: str) -> None:
        """`Engine.commit_weights`."""
        self._engine.commit_weights(version, cache=cache)

    def drop_weights(self) -> None:
        """`Engine.drop_weights`."""
        self._engine.drop_weights()

    def update_weight_version(self, version: str | int) -> None:
        """`Engine.update_weight_version`."""
        self._engine.update_weight_version(version)

    def set_held(self, is_held: bool) -> None:
        """Hold admission, or open it."""
        (self._engine.hold_admission if is_held else self._engine.open_admission)()

    def pause(self, mode: str) -> None:
        """`Engine.pause`."""
        self._engine.pause(mode=mode)

    def resume(self) -> None:
        """`Engine.resume`."""
        self._engine.resume()

    def release_memory(self, tags: Sequence[str]) -> None:
        """`Engine.release_memory_occupation`."""
        self._engine.release_memory_occupation(list(tags))

    def resume_memory(self) -> None:
        """`Engine.resume_memory_occupation`."""
        self._engine.resume_memory_occupation()

    def stats(self) -> dict[str, object]:
        """`Engine.stats` as a dict, with what is prepared, paused and released."""
        stats = self._engine.stats()
        names = ("running", "waiting", "accepted", "num_steps", "weight_version", "update_count", "free_pages")
        return {
            **{name: getattr(stats, name) for name in names},
            "total_pages": stats.total_pages,
            "finished": dict(stats.finished),
            "prepared_version": self._engine.prepared_version,
            "paused": self._engine.paused,
            "released": list(self._engine.released),
        }

    def shutdown(self) -> None:
        """End the engine, and its followers with it."""
        if self._failure is None:
            self._engine.shutdown()


def _with_arrays(result: dict[str, Any]) -> dict[str, Any]:
    """A result with its rows as an array, and without their text form."""
    record = record_from_meta_info(result)
    if record is None:
        return result
    meta = {name: value for name, value in result["meta_info"].items() if name not in (PAYLOAD_KEY, WEIGHTS_KEY)}
    return {**result, "meta_info": meta, **_rows(record)}


def _rows(record: RoutedExperts | None) -> dict[str, Any]:
    if record is None:
        return {}
    return {
        "routed_experts": record.ids,
        "start": record.start,
        "layer_ids": record.layer_ids,
        "version_spans": record.version_spans,
        "version_labels": record.labels,
        **({} if record.weights is None else {"routed_experts_weights": record.weights}),
    }
