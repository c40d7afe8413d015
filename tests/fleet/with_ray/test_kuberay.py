"""The example for KubeRay has the fields of a RayService, and its application is one that a fleet takes."""

import copy
import importlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from routed_experts.core.errors import ConfigError
from routed_experts.fleet.spec import host_bundle
from routed_experts.fleet.start import replica_spec

ROOT = Path(__file__).parents[3]
SCHEMA = json.loads((Path(__file__).parent / "rayservice_schema.json").read_text(encoding="utf-8"))
EXAMPLE = yaml.safe_load((ROOT / "examples" / "kuberay_rayservice.yaml").read_text(encoding="utf-8"))


def test_the_example_has_the_fields_of_a_ray_service():
    jsonschema.validate(EXAMPLE, SCHEMA)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda example: example.update(kind="RayJob"),
        lambda example: example["spec"].update(serveConfig="x"),
        lambda example: example["spec"]["rayClusterConfig"]["workerGroupSpecs"][0].update(replicas="4"),
        lambda example: example["spec"]["rayClusterConfig"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda example: example["spec"]["rayClusterConfig"]["headGroupSpec"].pop("template"),
    ],
)
def test_a_wrong_field_is_found(spoil):
    example = copy.deepcopy(EXAMPLE)
    spoil(example)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(example, SCHEMA)


def test_its_application_is_a_fleet_that_its_hosts_hold():
    config = yaml.safe_load(EXAMPLE["spec"]["serveConfigV2"])
    (deployed,) = config["applications"]
    module, _, name = deployed["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name)) and deployed["route_prefix"] == "/"
    spec = replica_spec(deployed["args"])
    assert (spec.fleet.num_replicas, spec.dist.nnodes, spec.args.tp_size) == (2, 2, 16)
    (workers,) = EXAMPLE["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    limits = workers["template"]["spec"]["containers"][0]["resources"]["limits"]
    gpus = float(limits["nvidia.com/gpu"])
    bundle = host_bundle(spec.args.tp_size, spec.dist.nnodes, {"CPU": float(limits["cpu"]), "GPU": gpus})
    assert bundle == {"CPU": 1.0, "GPU": gpus}, "a process of a replica is a host"
    assert workers["replicas"] == spec.fleet.num_replicas * spec.dist.nnodes


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"no_such_field": 1}, "no_such_field is no argument of a fleet"),
        ({"num_replicas": 0}, "num_replicas=0 must be"),
        ({"nnodes": 2, "tp_size": 2, "node_rank": 0}, "Ray starts the followers"),
    ],
)
def test_wrong_arguments_of_an_application_are_refused(arguments, expected):
    with pytest.raises(ConfigError, match=expected):
        replica_spec({"model_path": "demo", **arguments})


def test_lists_of_yaml_are_taken():
    spec = replica_spec({"model_path": "demo", "precompile_bs_paddings": [4, 8], "num_replicas": 3})
    assert spec.args.precompile_bs_paddings == (4, 8) and spec.fleet.ray_address == "auto"
