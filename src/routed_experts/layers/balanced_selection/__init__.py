"""Expert selection under capacities, and the choice among replicas.

selection.py         the public function, in its two modes: "replicas" (lossless) and "reroute" (bounded by capacity)
reference.py         what "reroute" means, slot by slot in NumPy: the oracle
admission.py         "reroute" in parallel rounds, as array code; tpu_kernel.py: the same rounds as one Pallas kernel
waterfill.py         "replicas": shares of the instances that level the devices' load
checks.py            host-side checks of tables and capacities
capacity_routing.py  routers of a served model under capacities"""
