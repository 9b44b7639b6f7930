"""The disk tier: records of blocks in safetensors files, in a private folder on a local drive."""
