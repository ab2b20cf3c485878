"""The policy: transformer.py (decoder and KV cache), loaders, tokenizer, chat."""
