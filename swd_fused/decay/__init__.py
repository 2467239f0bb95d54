"""Weight decay: its kinds, calibration in AdamW's terms, and the warning."""
