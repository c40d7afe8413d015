"""One file a family: reads config.json into a FamilyConfig and names the tensors. common_config.py reads what nearly
all config.json files share."""
