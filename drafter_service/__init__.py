"""The drafter: its models (Mamba, Llama, Qwen), its serving engine and its training."""
