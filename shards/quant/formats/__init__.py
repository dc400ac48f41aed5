"""Published formats of quantised checkpoints, one file each: their fields in config.json and their tensors."""
