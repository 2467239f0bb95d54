"""The tensors of a step: what is known of them, and how one notices that it no longer holds."""
