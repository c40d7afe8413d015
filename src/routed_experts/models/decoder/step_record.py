"""The capture of a step, as kernels read and write it: blocks that rows are written to in place."""

import dataclasses

from routed_experts.capture.device_cache import RoutedExpertsDeviceCache
from routed_experts.layers.routing import RoutingBlock


def to_block(capture: RoutedExpertsDeviceCache | None) -> RoutingBlock | None:
    """The blocks of the capture; None where nothing is recorded."""
    return None if capture is None else RoutingBlock(capture.ids, capture.weights)


def with_block(capture: RoutedExpertsDeviceCache | None, block: RoutingBlock | None) -> RoutedExpertsDeviceCache | None:
    """The capture with the blocks that a kernel has written."""
    if capture is None or block is None:
        return capture
    return dataclasses.replace(capture, ids=block.ids, weights=block.weights)
