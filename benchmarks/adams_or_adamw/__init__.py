"""Trains AdamS and AdamW to near-zero training loss with tuned decays, and compares test errors in pairs of runs."""
