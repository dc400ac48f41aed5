"""LoRA adapters: read from PEFT checkpoints, kept in memory within bounds, and added to a network's matrices."""
