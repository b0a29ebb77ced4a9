"""`blr bench decode`: whole models beside transformers."""
