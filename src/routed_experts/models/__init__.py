"""Model families as flax.nnx modules that serve and train, filled from Hugging Face checkpoints by a table of names.

model_folder.py   a checkpoint folder becomes a model
registry.py       the table of families; docs/models.md is written from it
families/         one file a family: reads config.json into a FamilyConfig, names the tensors
offload/          the decoder layer by layer, with experts on the host
decoder/          the decoder of all families, its parts, the fused path, replica maps
loading/          checkpoints, the load plan, the loader, export, dummy weights
sharding.py       weights sharded over a mesh
base/             the decoder interface, config reader, partitions, rows of the table of names

Imports go down this list only. To add a family: write families/<name>.py with `read_<name>(reader) -> FamilyConfig`,
add its entry to registry.py, a case to tests/oracles/families.py, and run scripts/models_page.py."""
