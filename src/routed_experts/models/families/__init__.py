"""One file a family: reads config.json into a FamilyConfig and names the tensors. common_config.py reads what nearly
all config.json files share. Only qwen3_moe.py has a decoder of its own."""
